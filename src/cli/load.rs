//! What verbs share that run the model: the flags, opening it, and progress on a terminal.

#![forbid(unsafe_code)]

use super::{Args, Flag, note, print_text};
use crate::bail;
use crate::config::Config;
use crate::convert::Sums;
use crate::cpu::Isa;
use crate::disk::Direct;
use crate::draft::DRAFTS_MAX;
use crate::engine::{Engine, Options, Restored};
use crate::error::{Context, Error, Result};
use crate::experts::trace::{Shape, Writer};
use crate::experts::usage;
pub use crate::json::object;
use crate::json::{Value, to_compact};
use crate::model::Observer;
use crate::object;
use crate::plan::{Limit, gb};
use crate::safetensors::Directory;
use crate::sys;
use crate::weights::Input;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Flags that say where the shards are.
pub const MODEL_FLAGS: &[Flag] = &[
    super::MODEL,
    Flag::value("--model-dirs", "DIRS", "further directories with shards, comma-separated")
        .or_env("COLI_MODEL_DIRS")
        .repeated(),
];

/// Flags that decide how much memory a run takes.
pub const PLAN_FLAGS: &[Flag] = &[
    Flag::value("--ctx", "N", "tokens that fit the context (default 4096)").or_env("CTX"),
    Flag::value("--ram", "GB", "memory of the run (default: 85 % of available)").or_env("RAM_GB"),
    Flag::value("--cap", "N", "expert slots per layer, instead of --ram"),
    Flag::value("--chunk", "N", "prompt rows per pass (default 256); never changes a bit"),
    Flag::value("--threads", "N", "threads that compute (default: cores that we may use)"),
];

/// Further flags of every verb that runs the model.
pub const FLAGS: &[Flag] = &[
    Flag::value("--isa", "NAME", "auto, scalar, avx2 or avx512 (default auto); same bits"),
    Flag::value("--direct", "MODE", "reads around the page cache: auto, on or off (default auto)"),
    Flag::value("--mirror", "DIR", "copies of the model's shards on another drive")
        .or_env("COLI_MODEL_MIRROR")
        .repeated(),
    Flag::value("--draft", "N", "drafts of each pass (default: what pays; 0: none)")
        .or_env("DRAFT"),
];

/// `--pin`, of the verbs that run for a person or plan such a run.
pub const PIN: Flag =
    Flag::value("--pin", "GB", "expert memory that the most used of earlier runs keep (default 0)")
        .or_env("PIN_GB");

/// Flags of the verbs that learn from run to run which experts are used.
pub const LEARN_FLAGS: &[Flag] = &[
    Flag::value("--usage", "FILE", "which experts were used, learned from run to run; off: no")
        .or_env("COLI_USAGE"),
    PIN,
    Flag::value("--repin", "N", "choose what is pinned anew after N tokens (default 0: never)"),
];

/// The directories of a flag: separated by commas or semicolons, or one each time it is given.
fn dirs(args: &Args, name: &str) -> Vec<PathBuf> {
    let values = args.all(name);
    let parts = values.iter().flat_map(|value| value.split([',', ';']));
    parts.filter(|part| !part.is_empty()).map(PathBuf::from).collect()
}

/// Opens the shards that [`MODEL_FLAGS`] name.
pub fn directory(args: &Args) -> Result<Directory> {
    Directory::open_split(Path::new(args.required("--model")?), &dirs(args, "--model-dirs"))
}

/// The options of the shared flags.
pub fn options(args: &Args) -> Result<Options> {
    // 0 is "decide yourself" for the users of RAM_GB.
    let ram_gb = args.number("--ram", 0.0..=1e6)?.filter(|gb: &f64| *gb > 0.0);
    let ram = ram_gb.map(|gb| Limit::RamBytes((gb * 1e9).round() as usize));
    let cap = args.number("--cap", 1..=4096usize)?.map(Limit::SlotsPerLayer);
    let pin_gb: f64 = args.number("--pin", 0.0..=1e6)?.unwrap_or(0.0);
    if args.has("--repin") && !args.has("--pin") {
        return Err(Error::usage("--repin needs a --pin"));
    }
    let isa = args.get("--isa").map(|isa| isa.parse::<Isa>().and_then(Isa::checked)).transpose();
    let direct = args.get("--direct").map(str::parse).transpose();
    let default = Options::default();
    Ok(Options {
        model_dirs: dirs(args, "--model-dirs"),
        mirrors: dirs(args, "--mirror"),
        ctx_tokens: args.number("--ctx", 1..=1 << 24)?.unwrap_or(default.ctx_tokens),
        chunk_rows: args.number("--chunk", 1..=4096)?.unwrap_or(default.chunk_rows),
        threads: args.number("--threads", 1..=1024)?.unwrap_or(default.threads),
        drafts: args.number("--draft", 0..=DRAFTS_MAX)?,
        isa: isa.map_err(|error| usage("--isa", error))?.unwrap_or(default.isa),
        direct: direct.map_err(|error| usage("--direct", error))?.unwrap_or(default.direct),
        limit: cap.or(ram).unwrap_or(default.limit),
        pin_bytes: (pin_gb * 1e9).round() as usize,
        repin_tokens: args.number("--repin", 0..=usize::MAX)?.unwrap_or(0),
        ..default
    })
}

/// The error of a flag's value.
pub fn usage(flag: &str, error: Error) -> Error {
    Error::usage(format!("{flag}: {error}"))
}

/// A run before any weight is read. Loading takes minutes: what is wrong with the input is said
/// before it, from config.json alone.
pub struct Setup<'a> {
    /// The model directory.
    pub dir: &'a Path,
    /// Its shape.
    pub config: Config,
    options: Options,
}

impl Setup<'_> {
    /// Reads the shared flags and config.json. There is room for at least `tokens` positions where
    /// `--ctx` does not say otherwise.
    pub fn new(args: &Args, tokens: usize) -> Result<Setup<'_>> {
        let dir = Path::new(args.required("--model")?);
        let mut options = options(args)?;
        if !args.has("--ctx") {
            options.ctx_tokens = options.ctx_tokens.max(tokens);
        }
        Ok(Setup { dir, config: Config::load(dir)?, options })
    }

    /// There is memory for this many sessions.
    pub fn hold_sessions(&mut self, sessions: usize) {
        self.options.sessions = sessions;
    }

    /// Reads experts around the page cache, which would hide the drive.
    pub fn read_direct(&mut self) {
        self.options.direct = Direct::On;
    }

    /// Positions of the context.
    pub fn ctx_tokens(&self) -> usize {
        self.options.ctx_tokens
    }

    /// Refuses tokens that cannot be run: none, too many for the context, or an id outside the
    /// vocabulary.
    pub fn check(&self, ids: &[u32]) -> Result<()> {
        let (tokens, ctx, vocab) = (ids.len(), self.options.ctx_tokens, self.config.vocab_size);
        if ids.is_empty() {
            bail!("no tokens to run");
        }
        if tokens > ctx {
            bail!("{tokens} tokens do not fit the context of {ctx} (see --ctx)");
        }
        if let Some(at) = ids.iter().position(|id| *id as usize >= vocab) {
            bail!("token {} at position {at}: expected an id below {vocab}", ids[at]);
        }
        Ok(())
    }

    /// Refuses a directory without tokenizer.json.
    pub fn check_text(&self) -> Result<()> {
        if sys::is_present(&self.dir.join("tokenizer.json")) {
            return Ok(());
        }
        bail!(
            "{}: no tokenizer.json, without which there is no text; coli run --ids needs none",
            self.dir.display()
        )
    }

    /// Reads the weights for a run that feeds at most `tokens` tokens. Progress and notes go to
    /// stderr; from now on SIGINT stops the forward pass.
    pub fn open(self, tokens: usize) -> Result<Engine> {
        let mut bar = Bar::new("loading");
        let engine = Engine::open(self.dir, self.options, |done, all| {
            bar.show(done, all, || format!("{} of {}", gb(done), gb(all)));
        })?;
        bar.clear();
        if let Some(text) = engine.reading_note() {
            note(&format!("coli: {text}\n"));
        }
        if tokens > self.config.index_topk
            && let Some(text) = engine.dense_attention_note()
        {
            note(&format!("coli: {text}\n"));
        }
        sys::catch_interrupts();
        Ok(engine)
    }
}

/// Starts from what earlier runs learned; returns the file to write what this one adds.
pub fn open_usage(args: &Args, engine: &Engine) -> Option<PathBuf> {
    let path = match args.get("--usage") {
        Some("off") => return None,
        Some(file) => file.into(),
        None => Path::new(args.get("--model")?).join(usage::FILE_NAME),
    };
    if let Err(error) = engine.load_usage(&path) {
        note(&format!("coli: {error}; the run goes on without, and leaves the file alone\n"));
        return None;
    }
    // As for the C engine: the file is only read.
    (std::env::var("USAGE_SAVE").as_deref() != Ok("0")).then_some(path)
}

/// Writes what was learned; a run does not fail by it.
pub fn save_usage(file: Option<PathBuf>, engine: &Engine) {
    let saved = file.map_or(Ok(()), |file| engine.save_usage(&file));
    saved.unwrap_or_else(|error| note(&format!("coli: {error}; what was learned is lost\n")));
}

/// What a person should know who goes on with a saved session.
pub fn resumed(file: &Path, restored: &Restored) -> String {
    let age_s = restored.age.as_secs();
    let units = [("days", 86_400), ("hours", 3600), ("minutes", 60)];
    let fits = units.into_iter().find(|(_, seconds)| age_s >= 2 * seconds);
    let (unit, seconds) = fits.unwrap_or(("seconds", 1));
    let (file, tokens, age) = (file.display(), restored.tokens, age_s / seconds);
    format!("{file}: resumes {tokens} tokens saved {age} {unit} ago")
}

/// Stops the forward pass between layers once SIGINT arrived; shows the progress of a prompt, and
/// says which mirrors failed. Writes a trace if it is told to.
pub struct Watch<'a> {
    engine: &'a Engine,
    trace: Option<Writer>,
    /// Sums of squared activations, if they are wanted.
    pub calibration: Option<Sums>,
    bar: Bar,
    tokens: usize,
    layers: usize,
    /// Of all tokens, what position 0 is.
    start: usize,
    /// Layers that are done, of all positions together.
    steps: usize,
    /// When the first token of a reply was chosen.
    first: Option<Instant>,
}

impl<'a> Watch<'a> {
    /// For a run over `tokens` positions of `engine`'s model.
    pub fn new(engine: &'a Engine, tokens: usize) -> Watch<'a> {
        let layers = engine.config().num_layers;
        let bar = Bar::new("running");
        let (trace, calibration, first) = (None, None, None);
        Watch { engine, trace, calibration, bar, tokens, layers, start: 0, steps: 0, first }
    }

    /// The first `kept` positions are in the cache already.
    pub fn keep(&mut self, kept: usize) {
        self.steps = kept.min(self.tokens) * self.layers;
        self.bar.first_step = self.steps;
    }

    /// Writes the routing of all passes to a file from now on. Errors name it.
    pub fn trace(&mut self, path: &Path) -> Result<()> {
        let Config { num_layers: layers, n_routed_experts: experts, top_k, .. } =
            *self.engine.config();
        self.trace = Some(Writer::create(path, Shape { layers, experts, top_k })?);
        Ok(())
    }

    /// Ends the trace, if there is one. Error: it is not whole.
    pub fn end_trace(&mut self) -> Result<()> {
        self.trace.take().map_or(Ok(()), Writer::finish)
    }

    /// Position 0 of the next pass is this one of all tokens.
    pub fn start_at(&mut self, start: usize) {
        self.start = start;
        self.steps = start * self.layers;
    }

    /// Seconds from the start to the first token of the reply, and from there to now.
    pub fn seconds(&self) -> [f64; 2] {
        let first = self.first.unwrap_or_else(Instant::now);
        [first - self.bar.start, first.elapsed()].map(|time| time.as_secs_f64())
    }

    /// Removes the progress line.
    pub fn clear(&mut self) {
        self.bar.clear();
    }
}

impl Observer for Watch<'_> {
    fn hidden(&mut self, layer: usize, position: usize, hidden: &[f32]) {
        if layer > self.layers {
            self.input(layer, Input::Head, hidden);
        }
        // Positions behind the prompt are the reply's: its text owns the line by then.
        if (1..=self.layers).contains(&layer) && self.start + position < self.tokens {
            self.steps += 1;
            let all = self.tokens * self.layers;
            self.bar.show(self.steps.min(all), all, || format!("{} tokens", self.tokens));
        }
    }

    fn routed(&mut self, layer: usize, _position: usize, route: &[(u32, f32)]) {
        if let Some(trace) = &mut self.trace {
            trace.add_row(layer, route.iter().map(|(e, _)| *e));
        }
    }

    fn chosen(&mut self, _token: u32, _logits: &[f32]) {
        if self.first.is_none() {
            self.first = Some(Instant::now());
            self.bar.clear();
        }
    }

    fn input(&mut self, layer: usize, input: Input, x: &[f32]) {
        if let Some(sums) = &mut self.calibration {
            sums.add(layer, input, x);
        }
    }

    fn interrupted(&mut self) -> bool {
        while let Some(text) = self.engine.take_mirror_end() {
            self.bar.clear();
            note(&format!("coli: {text}\n"));
        }
        // Asked between layers: what was routed before is one visit.
        self.trace.iter_mut().for_each(Writer::end_visit);
        sys::interrupted()
    }
}

/// A one-line progress display on stderr, only on a terminal.
pub struct Bar {
    label: &'static str,
    on_terminal: bool,
    shown_percent: Option<usize>,
    start: Instant,
    /// What was done at the start.
    first_step: usize,
}

impl Bar {
    /// A display that starts empty; `label` says what is being done.
    pub fn new(label: &'static str) -> Bar {
        let on_terminal = std::io::stderr().is_terminal();
        Bar { label, on_terminal, shown_percent: None, start: Instant::now(), first_step: 0 }
    }

    /// Redraws when another percent is done, with the time that the rest will take at this pace.
    pub fn show(&mut self, done: usize, all: usize, text: impl FnOnce() -> String) {
        let percent = (done as u128 * 100 / all.max(1) as u128) as usize;
        if self.on_terminal && self.shown_percent != Some(percent) {
            self.shown_percent = Some(percent);
            let step_s =
                self.start.elapsed().as_secs_f64() / (done - self.first_step).max(1) as f64;
            let left_s = step_s * (all - done) as f64;
            note(&format!("\r\x1b[K{} {percent} % ({}), {left_s:.0} s left", self.label, text()));
        }
    }

    /// Removes the line; the next [`Bar::show`] draws it again.
    pub fn clear(&mut self) {
        if self.shown_percent.take().is_some() {
            note("\r\x1b[K");
        }
    }
}

impl Drop for Bar {
    /// What failed is said on a line of its own.
    fn drop(&mut self) {
        self.clear();
    }
}

/// A file of UTF-8 text. Errors name it, and the byte where it is something else.
pub fn read_text(path: &str, bytes_max: usize) -> Result<String> {
    let bytes = sys::read_file(Path::new(path), bytes_max).context(|| path)?;
    String::from_utf8(bytes).map_err(|e| {
        Error::new(format!("{path}: not UTF-8 at byte {}", e.utf8_error().valid_up_to()))
    })
}

/// A chat request of messages, each a role and its text.
pub fn request(messages: &[(&str, &str)], thinking: bool) -> Value {
    let message = |(role, text): &(&str, &str)| object! { "role": *role, "content": *text };
    let messages: Vec<Value> = messages.iter().map(message).collect();
    object! { "messages": messages, "enable_thinking": thinking }
}

/// Prints one JSON object and a newline to stdout.
pub fn print_json(value: &Value) -> Result<()> {
    print_text(&(to_compact(value) + "\n"))
}

/// A count as a JSON integer.
pub fn count(value: usize) -> Value {
    value.into()
}

/// A measured number: four significant digits, as more would pretend to be known, unless it is
/// whole; null for what could not be measured.
pub fn figure(value: f64) -> Value {
    if value.fract() == 0.0 {
        return Value::Int(value as i64);
    }
    // What is not a number stays so, and is null in JSON.
    let rounded = format!("{value:.3e}").parse().ok().filter(|rounded: &f64| rounded.is_finite());
    rounded.into()
}
