//! [`Engine`]: a loaded model, shared and never changed; [`Session`]: one token timeline on it.
//!
//! This is the only boundary that the upper layers see. They hand over whole token prefixes, and
//! the session keeps what it can: the longest common prefix stays in the cache, the rest is
//! computed. Logits come out as plain slices; no weight or cache type crosses.

#![forbid(unsafe_code)]

use crate::bail;
use crate::config::Config;
use crate::cpu::{self, Isa};
use crate::disk::{self, Direct};
use crate::draft::{self, DRAFTS_MAX, Drafter, Source};
use crate::error::{Context, Result};
use crate::experts::usage::Usage;
use crate::experts::view::View;
use crate::experts::{Counters, ExpertStore};
use crate::grammar::{Constraint, Grammar, Guided, Vocabulary};
use crate::kv::{KvCache, Sequence};
use crate::memory::Available;
use crate::model::{Model, Observer, Runtime, Scratch};
use crate::ops::{Compute, Tally};
use crate::plan::{Limit, Plan};
use crate::safetensors::Directory;
use crate::sample::{Choose, Params, Sampler};
use crate::state::{Fingerprint, Journal, common_tokens};
use crate::sys;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

mod generate;
mod saved;

pub use generate::{Generation, Member};
pub use saved::{Restored, Saved};

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Further directories with shards of the container.
    pub model_dirs: Vec<PathBuf>,
    /// Directories on other drives with copies of shards.
    pub mirrors: Vec<PathBuf>,
    /// Positions that one session can hold.
    pub ctx_tokens: usize,
    /// Sessions that there is memory for.
    pub sessions: usize,
    /// Rows of one prefill batch.
    pub chunk_rows: usize,
    /// Memory for routed experts.
    pub limit: Limit,
    /// Threads that compute.
    pub threads: usize,
    /// Whether experts are read around the page cache.
    pub direct: Direct,
    /// Drafts of each forward pass; `None` lets what they cost and bring decide, and 0 leaves the
    /// draft head on disk.
    pub drafts: Option<usize>,
    /// Vector instructions; a level that the processor lacks is replaced by the best below it.
    pub isa: Isa,
    /// Bytes of the most used experts that are evicted after all others; within `limit`.
    pub pin_bytes: usize,
    /// Positions after which these are chosen anew, by what was chosen since; 0 is never.
    pub repin_tokens: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            model_dirs: Vec::new(),
            mirrors: Vec::new(),
            ctx_tokens: 4096,
            sessions: 1,
            chunk_rows: 256,
            limit: Limit::Available,
            threads: cpu::default_threads(),
            direct: Direct::Auto,
            drafts: None,
            isa: Isa::detect(),
            pin_bytes: 0,
            repin_tokens: 0,
        }
    }
}

impl Options {
    /// The memory of a run with these options, where so much is `available`; [`Engine::open`]
    /// makes the same plan before it reads any weight. Error: it does not fit.
    pub fn plan(
        &self,
        config: &Config,
        weights: &Weights,
        available: Option<&Available>,
    ) -> Result<Plan> {
        let index_layers = weights.index_layers();
        let context_bytes = |tokens| {
            let kv_bytes = self.sessions * KvCache::bytes(config, &index_layers, tokens);
            // One session may run a part of its prompt while the others check drafts.
            let checking = 1 + DRAFTS_MAX;
            let rows = self.chunk_rows.max(checking) + (self.sessions.max(1) - 1) * checking;
            let head_bytes = 4 * (rows + ABSORB_ROWS) * config.hidden_size;
            (kv_bytes, Scratch::bytes(config, tokens, rows, self.threads) + head_bytes)
        };
        let plan = Plan::new(weights, self.ctx_tokens, context_bytes, self.limit, available)?;
        plan.check_pins(self.pin_bytes, config.top_k)?;
        Ok(plan)
    }
}

/// Hidden states that wait for the draft head at most, beside those of one batch: together they
/// cost it hardly more than one.
const ABSORB_ROWS: usize = 64;
/// The last of them that are kept while it rests: it sees the text before in these. More than what
/// a pass with drafts leaves behind.
const REST_ROWS: usize = 32;

/// Control tokens that end the model's turn, beside the configured end-of-sequence ids.
const STOP_TOKENS: [&str; 3] = ["<|endoftext|>", "<|user|>", "<|observation|>"];

/// Control tokens that only the prompt template may write; the model must never produce them.
const TEMPLATE_TOKENS: [&str; 10] = [
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|assistant|>",
    "<tool_response>",
    "</tool_response>",
    "/nothink",
];

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token, or the caller had enough.
    Stop,
    /// The limit of new tokens or the end of the context.
    Length,
}

/// A loaded model.
pub struct Engine {
    model: Model,
    options: Options,
    /// One forward pass at a time has it.
    runtime: Mutex<Runtime>,
    view: Arc<View>,
    tokenizer: Option<Tokenizer>,
    /// The tokenizer's text, for grammars; made when the first one comes.
    vocabulary: OnceLock<Arc<Vocabulary>>,
    reading_note: Option<String>,
    kv_bytes: usize,
    /// Positions run since the pins were chosen.
    unpinned_tokens: AtomicUsize,
    /// See [`Engine::saved_shape`].
    fingerprint: OnceLock<Fingerprint>,
}

impl Engine {
    /// Opens the model directory: everything is checked and planned, then resident weights are
    /// read. `progress` is called with (bytes read, bytes in all).
    pub fn open(
        dir: &Path,
        options: Options,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Engine> {
        // The configuration decides whether any weight file is opened at all.
        let config = Config::load(dir)?;
        let tokenizer_file = dir.join("tokenizer.json");
        let tokenizer = sys::is_present(&tokenizer_file)
            .then(|| Tokenizer::load(&tokenizer_file))
            .transpose()?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_rows(config.vocab_size).context(|| tokenizer_file.display())?;
        }
        let mut directory = Directory::open_split(dir, &options.model_dirs)?;
        options.mirrors.iter().for_each(|mirror| directory.add_mirror(mirror));
        let reading_note = disk::prepare(&mut directory, options.direct)?;
        let mut weights = Weights::bind(&directory, &config).context(|| dir.display())?;
        if options.drafts == Some(0) {
            weights.mtp = None;
        }
        let plan = options.plan(&config, &weights, Available::now().as_ref())?;
        // The draft head is among the experts while it is in use.
        let head_bytes = weights.head_bytes();
        let store_bytes = plan.expert_bytes + head_bytes;
        let mut store = ExpertStore::new(store_bytes, plan.largest_expert_bytes)?;
        let view = Arc::new(View::new(weights.all_layers().map(|(_, layer)| layer.experts())));
        store.show(Arc::clone(&view));
        let load_bytes = plan.resident_bytes - head_bytes;
        weights.load(&directory, |bytes| progress(bytes, load_bytes))?;
        let model = Model::new(config, directory, weights);
        let compute = Compute::new(options.threads, options.isa);
        let runtime = Runtime { compute, store, head: None, scratch: Scratch::default() };
        let unpinned_tokens = AtomicUsize::new(0);
        let vocabulary = OnceLock::new();
        let fingerprint = OnceLock::new();
        Ok(Engine {
            model,
            options,
            runtime: Mutex::new(runtime),
            view,
            tokenizer,
            vocabulary,
            reading_note,
            kv_bytes: plan.kv_bytes,
            unpinned_tokens,
            fingerprint,
        })
    }

    /// Makes known which experts earlier runs chose, from `.coli_usage` in the model directory or a
    /// file like it, and reads those that are to be pinned. That never changes a bit of the output.
    /// Errors: the file is not one of this model, or an expert cannot be read.
    pub fn load_usage(&self, path: &Path) -> Result<()> {
        let config = &self.model.config;
        let usage = Usage::read(path, config.num_layers, config.n_routed_experts)?;
        let mut runtime = self.runtime();
        runtime.store.learn(usage, config.top_k);
        self.pin(&mut runtime.store);
        for (layer, moe) in self.model.weights.sparse_layers() {
            runtime.store.preload(&self.model.directory, layer, &moe.experts)?;
        }
        Ok(())
    }

    /// Replaces such a file by what it said and what was chosen since. Error: it cannot be written;
    /// it is as it was then.
    pub fn save_usage(&self, path: &Path) -> Result<()> {
        let config = &self.model.config;
        let usage = self.runtime().store.usage().clone();
        usage.write(path, config.num_layers, config.n_routed_experts)
    }

    fn pin(&self, store: &mut ExpertStore) {
        let sparse = self.model.weights.sparse_layers();
        store.pin(self.options.pin_bytes, |(layer, e)| {
            let moe = sparse.clone().find(|(at, _)| *at == layer).map(|(_, moe)| moe);
            moe.map_or(0, |moe| moe.experts[e].bytes())
        });
    }

    /// Notes that `rows` were run, and chooses the pins anew when it is time.
    fn repin(&self, rows: usize, runtime: &mut Runtime) {
        let run = self.unpinned_tokens.fetch_add(rows, Relaxed) + rows;
        if self.options.repin_tokens > 0 && run >= self.options.repin_tokens {
            self.unpinned_tokens.store(0, Relaxed);
            self.pin(&mut runtime.store);
        }
    }

    fn runtime(&self) -> MutexGuard<'_, Runtime> {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it was opened.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.model.config
    }

    /// The tokenizer; an error when the directory has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        match &self.tokenizer {
            Some(tokenizer) => Ok(tokenizer),
            None => bail!("{}: no tokenizer.json", self.model.directory.path().display()),
        }
    }

    /// Tokens that end a turn: those of the configuration and the tokenizer's own. None of them
    /// is ever part of a reply.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let mut ids = self.model.config.eos_token_ids.clone();
        let named = |t: &Tokenizer| STOP_TOKENS.map(|name| t.token_id(name));
        ids.extend(self.tokenizer.iter().flat_map(named).flatten());
        ids
    }

    /// Tokens that must never be sampled: those that only the template writes, and rows of the
    /// padded vocabulary that have no token.
    pub fn never_sampled(&self) -> Vec<u32> {
        let Some(tokenizer) = &self.tokenizer else { return Vec::new() };
        let padding = tokenizer.vocab_size() as u32..self.model.config.vocab_size as u32;
        let template = TEMPLATE_TOKENS.iter().filter_map(|name| tokenizer.token_id(name));
        // What the configuration calls the end of a sequence must stay possible.
        let stops = self.stop_tokens();
        template.chain(padding).filter(|id| !stops.contains(id)).collect()
    }

    /// Follows `grammar` from its start, over the text tokens of this model. Errors: no tokenizer,
    /// or a grammar that is too ambiguous.
    pub fn constraint(&self, grammar: Grammar) -> Result<Constraint> {
        let tokenizer = self.tokenizer()?;
        let vocabulary = self.vocabulary.get_or_init(|| {
            let ids = (0..tokenizer.vocab_size() as u32).filter(|id| !tokenizer.is_added(*id));
            let text = ids.filter_map(|id| Some((id, tokenizer.token_bytes(id)?)));
            Arc::new(Vocabulary::new(text))
        });
        Constraint::new(Arc::new(grammar), Arc::clone(vocabulary))
    }

    /// What chooses the tokens of a reply: as `params` say, and where there is a constraint, such
    /// that the text matches it, which starts behind the thought if the prompt left one open.
    pub fn chooser(
        &self,
        params: Params,
        constraint: Option<Constraint>,
        is_thinking: bool,
    ) -> Result<Box<dyn Choose + '_>> {
        let sampler = Sampler::new(params, self.model.config.vocab_size, self.never_sampled())?;
        let Some(constraint) = constraint else { return Ok(Box::new(sampler)) };
        let tokenizer = self.tokenizer()?;
        let end_think = tokenizer.token_id("</think>").filter(|_| is_thinking);
        let guided = Guided::new(sampler, constraint, tokenizer, self.stop_tokens());
        Ok(Box::new(guided.after(end_think)))
    }

    /// Bytes that the caches of all sessions take together.
    pub fn kv_bytes(&self) -> usize {
        self.kv_bytes
    }

    /// A note to show before running: how experts are read, and why, when that was chosen, and
    /// from which mirrors.
    pub fn reading_note(&self) -> Option<&str> {
        self.reading_note.as_deref()
    }

    /// A note to show while running: a mirror whose reads failed is no longer used. Each is
    /// returned once.
    pub fn take_mirror_end(&self) -> Option<String> {
        self.model.directory.take_mirror_end()
    }

    /// A note to show before running, when the directory's files make the model compute something
    /// else than it was trained with: attention beyond `index_topk` without an indexer.
    pub fn dense_attention_note(&self) -> Option<String> {
        let topk = self.model.config.index_topk;
        let lacks = !self.model.weights.has_indexer && self.options.ctx_tokens > topk;
        lacks.then(|| {
            format!(
                "this container has no indexer tensors: attention stays dense beyond {topk} \
                 tokens, where the model was trained with sparse attention"
            )
        })
    }

    /// Hits, misses and bytes of the expert store since the engine was opened.
    pub fn expert_counters(&self) -> Counters {
        self.runtime().store.counters()
    }

    /// What can be seen of the expert store, also while a pass runs.
    pub fn expert_view(&self) -> &View {
        &self.view
    }

    /// Evicts all routed experts: from here on they are read again.
    pub fn forget_experts(&self) {
        self.runtime.lock().unwrap_or_else(PoisonError::into_inner).store.forget_all();
    }

    /// Work done since the engine was opened, or since this was last asked.
    pub fn take_tally(&self) -> Tally {
        std::mem::take(&mut self.runtime().compute.tally)
    }

    /// A new, empty timeline. Error: no memory for its cache.
    pub fn session(&self) -> Result<Session<'_>> {
        let index_layers = self.model.weights.index_layers();
        let config = &self.model.config;
        Ok(Session {
            engine: self,
            tokens: Vec::with_capacity(self.options.ctx_tokens),
            kv: KvCache::new(config, &index_layers, self.options.ctx_tokens)?,
            logits: Vec::new(),
            head: self.model.weights.mtp.as_ref().map(|_| Head::default()),
            drafter: Drafter::new(self.options.drafts),
            journal: None,
        })
    }
}

/// How far a session's draft head is.
#[derive(Clone, Default)]
struct Head {
    /// Position of its first row: it knows nothing of the text before, which was run while it
    /// rested, or came from a file without it.
    first: usize,
    /// Rows in its cache: row r is made of position first + r and the token of the next one.
    rows: usize,
    /// `[committed tokens − next(), D]` hidden states of the positions behind those.
    hidden: Vec<f32>,
    /// The token that the row behind was made with for a draft; it is right if that token came.
    assumed: Option<u32>,
    /// `[D]`, input of the next guess
    input: Vec<f32>,
}

impl Head {
    /// Position of the next row.
    fn next(&self) -> usize {
        self.first + self.rows
    }

    /// Forgets what lies behind the first `tokens` positions, of which the session recomputes none.
    fn truncate(&mut self, tokens: usize, width: usize) {
        self.assumed = self.assumed.filter(|_| self.next() < tokens);
        self.first = self.first.min(tokens);
        self.rows = self.rows.min(tokens - self.first);
        self.hidden.truncate((tokens - self.next()) * width);
    }

    /// Begins anew at position `first`, whose hidden state waits.
    fn begin_at(&mut self, first: usize, width: usize) {
        self.hidden.drain(..(first - self.next()) * width);
        (self.first, self.rows, self.assumed) = (first, 0, None);
    }
}

/// One token timeline with its cache.
pub struct Session<'a> {
    engine: &'a Engine,
    /// Committed tokens: each has its rows in the cache.
    tokens: Vec<u32>,
    kv: KvCache,
    /// `[rows, V]` of the last rows that were asked for
    logits: Vec<f32>,
    /// Where the model has a draft head
    head: Option<Head>,
    drafter: Drafter,
    /// The file it was restored from or saved to last.
    journal: Option<Journal>,
}

impl Session<'_> {
    /// The model it runs on.
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Committed tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Makes `tokens` the timeline and returns the logits `[V]` that follow its last token.
    ///
    /// The longest common prefix is kept; at least the last token is computed. Errors: an empty
    /// or too long timeline, and those of the forward pass; after an error the session still holds
    /// the part that was committed.
    pub fn advance(&mut self, tokens: &[u32], observer: &mut dyn Observer) -> Result<&[f32]> {
        self.prepare(tokens)?;
        self.truncate(self.kept(tokens, tokens.len() - 1));
        while self.tokens.len() < tokens.len() {
            let rest = &tokens[self.tokens.len()..];
            let chunk = &rest[..rest.len().min(self.engine.options.chunk_rows)];
            let is_last = chunk.len() == rest.len();
            let wanted = if is_last { chunk.len() - 1..chunk.len() } else { 0..0 };
            self.forward(chunk, wanted, observer, |_, _, _| Ok(()))?;
            self.follow()?;
        }
        Ok(&self.logits)
    }

    /// How many positions, at most `most`, stay as they are when `tokens` become the timeline.
    fn kept(&self, tokens: &[u32], most: usize) -> usize {
        let kept = common_tokens(&self.tokens, tokens).min(most);
        // The draft head's row of the last kept position is made of a token that changes now, and
        // of a hidden state that is gone if that row was made already.
        match &self.head {
            Some(head) if kept < self.tokens.len() && kept <= head.next() => kept.saturating_sub(1),
            _ => kept,
        }
    }

    /// Keeps only the first `count` committed tokens.
    fn truncate(&mut self, count: usize) {
        self.tokens.truncate(count);
        if let Some(head) = &mut self.head {
            head.truncate(count, self.engine.model.config.hidden_size);
        }
    }

    /// Lets the draft head keep up with the committed tokens, many at a time. While it rests, it
    /// gets nothing, and has no memory: that would cost as much as drafts that do not pay.
    fn follow(&mut self) -> Result<()> {
        let Session { engine, tokens, head: Some(head), drafter, .. } = self else { return Ok(()) };
        if !drafter.rests(Source::Head) {
            return self.absorb(ABSORB_ROWS);
        }
        if tokens.len() - head.next() > ABSORB_ROWS {
            head.begin_at(tokens.len() - REST_ROWS, engine.model.config.hidden_size);
            engine.runtime().head = None;
        }
        Ok(())
    }

    /// Hands the draft head every hidden state whose next token is committed, if they are at least
    /// `rows`.
    fn absorb(&mut self, rows: usize) -> Result<()> {
        let Session { engine, kv, tokens, head: Some(head), .. } = self else { return Ok(()) };
        let Engine { model, runtime, options, .. } = engine;
        let width = model.config.hidden_size;
        let mut count = (tokens.len() - head.next()).saturating_sub(1);
        if count > 0 && head.assumed.take() == Some(tokens[head.next() + 1]) {
            head.rows += 1;
            head.hidden.drain(..width);
            count -= 1;
        }
        if count < rows {
            return Ok(());
        }
        let mut runtime = runtime.lock().unwrap_or_else(PoisonError::into_inner);
        // What a chunk was handed for is done with, also when the next one fails.
        for tokens in tokens[head.next() + 1..].chunks(options.chunk_rows) {
            let hidden = tokens.len() * width;
            model.absorb(tokens, head.rows, &head.hidden[..hidden], kv, &mut runtime)?;
            head.rows += tokens.len();
            head.hidden.drain(..hidden);
        }
        Ok(())
    }

    /// What drafting did in this session.
    pub fn draft_counters(&self) -> draft::Counters {
        self.drafter.counters
    }

    /// Makes `tokens` the timeline from scratch and hands the logits `[V]` after each of them to
    /// `sink`, in order.
    pub fn logits_of_all(
        &mut self,
        tokens: &[u32],
        observer: &mut dyn Observer,
        sink: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        self.logits_from(tokens, 0, observer, sink)
    }

    /// Makes `tokens` the timeline and hands the logits `[V]` after each of them from `first` on
    /// to `sink`, in order. Of what is before `first` the longest common prefix is kept.
    pub fn logits_from(
        &mut self,
        tokens: &[u32],
        first: usize,
        observer: &mut dyn Observer,
        mut sink: impl FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        self.prepare(tokens)?;
        self.truncate(self.kept(tokens, first));
        for chunk in tokens[self.tokens.len()..].chunks(self.engine.options.chunk_rows) {
            let unwanted = first.saturating_sub(self.tokens.len()).min(chunk.len());
            self.forward(chunk, unwanted..chunk.len(), observer, |_, logits, _| sink(logits))?;
            self.follow()?;
        }
        Ok(())
    }

    fn prepare(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            bail!("no tokens to run");
        }
        if tokens.len() > self.kv.capacity_tokens() {
            let ctx = self.kv.capacity_tokens();
            bail!("{} tokens do not fit the context of {ctx} (see --ctx)", tokens.len());
        }
        Ok(())
    }

    /// One batch behind the committed tokens; commits it. The logits of its rows `wanted` go to
    /// `sink` one after the other, with the row and the observer, and those of the last stay in
    /// `self.logits`.
    fn forward(
        &mut self,
        batch: &[u32],
        wanted: Range<usize>,
        observer: &mut dyn Observer,
        mut sink: impl FnMut(usize, &[f32], &mut dyn Observer) -> Result<()>,
    ) -> Result<()> {
        let Session { engine, tokens, kv, logits, .. } = self;
        let (model, mut runtime) = (&engine.model, engine.runtime());
        let mut sequence = [Sequence::new(batch, tokens.len(), kv)];
        model.forward(&mut sequence, &mut runtime, &mut [&mut *observer])?;
        model.logits(wanted, &mut runtime, logits, |row, logits| sink(row, logits, observer))?;
        self.commit(batch, 0, &runtime.scratch);
        self.engine.repin(batch.len(), &mut runtime);
        Ok(())
    }

    /// Takes `batch` into the timeline, which is there in `scratch` from row `first` on.
    fn commit(&mut self, batch: &[u32], first: usize, scratch: &Scratch) {
        if let Some(head) = &mut self.head {
            let rows = first..first + batch.len();
            head.hidden.extend(rows.flat_map(|t| self.engine.model.hidden(scratch, t)));
        }
        self.tokens.extend_from_slice(batch);
    }
}
