//! `coli chat`: a conversation at the terminal, or out of a pipe.
//!
//! A conversation is its tokens and nothing else. A message is rendered behind them, and what the
//! model said stays as it was drawn: a later turn never encodes it anew, so the cache holds all of
//! it, and the reply is that of one long prompt. Turns are found by their `<|user|>`, which no text
//! can spell. A reply that was stopped or cut is continued from its last token.

#![forbid(unsafe_code)]

use super::load::{self, Setup, Watch};
use super::{Args, Flag, Verb, hint, note, note_error, print_text, sampling};
use crate::bail;
use crate::chat;
use crate::draft;
use crate::engine::{Engine, Finish, Session};
use crate::error::{Error, Result};
use crate::experts;
use crate::plan::gb;
use crate::reply::Reply;
use crate::sample::Sampler;
use crate::state::common_tokens;
use crate::sys;
use crate::tokenizer::Tokenizer;
use input::{Entry, Input};
use paint::{Look, Painter};
use std::io::{IsTerminal, Stdin};
use std::path::{Path, PathBuf};

mod input;
mod paint;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "chat",
    positional: "",
    summary: "talk to the model; /help lists what can be done there",
    example: "coli chat --model oracle/demo --temp 0.7",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        load::LEARN_FLAGS,
        sampling::FLAGS,
        &[
            Flag::value("--system", "TEXT", "what the model is told before the first message"),
            Flag::value("--system-file", "FILE", "the same from a file"),
            Flag::value("--session", "FILE", "go on with what it holds, and save each turn to it"),
        ],
    ],
    run,
};

/// Longest system message.
const SYSTEM_BYTES_MAX: usize = 64 << 20;

const COMMANDS: [(&str, &str); 8] = [
    ("/more", "go on with the last reply (also :more)"),
    ("/undo", "drop the last message and its reply"),
    ("/reset", "drop everything (also :reset)"),
    ("/save FILE", "save the conversation"),
    ("/load FILE", "go on with a saved one instead of this"),
    ("/stats", "figures of all replies together"),
    ("/help", "this list"),
    ("/quit", "end, as Ctrl-D does (also :q)"),
];

const HELP_TAIL: &str = "Ctrl-C stops a reply, and ends the program where it waits for a message.\n\
     A message of several lines is a paste, lines that end in \\, or a block between \"\"\" and \
     \"\"\".\nA message that starts with / is written with //.\n";

fn run(args: &Args) -> Result<()> {
    let (new_tokens, stops) = (sampling::new_tokens(args)?, sampling::stops(args)?);
    let system = system_text(args)?;
    let setup = Setup::new(args, 0)?;
    let ctx = setup.ctx_tokens();
    let params = sampling::params(args, setup.config.vocab_size)?;
    setup.check_text()?;
    let engine = setup.open(ctx)?;
    let usage = load::open_usage(args, &engine);
    let tokenizer = engine.tokenizer()?;
    let mut chat = Chat {
        engine: &engine,
        tokenizer,
        session: engine.session()?,
        sampler: Sampler::new(params, engine.config().vocab_size, engine.never_sampled())?,
        system,
        thinks: args.has("--think"),
        new_tokens,
        stops,
        markers: Markers::find(tokenizer)?,
        on_terminal: std::io::stdin().is_terminal(),
        file: args.get("--session").map(PathBuf::from),
        tokens: Vec::new(),
        painter: Painter::new(Look::of_stdout()),
        total: Work::default(),
    };
    chat.resume()?;
    let result = chat.talk(Input::new(std::io::stdin(), sys::wait_for_stdin, chat.on_terminal));
    load::save_usage(usage, &engine);
    result
}

/// What the flags tell the model first.
fn system_text(args: &Args) -> Result<Option<String>> {
    match (args.get("--system"), args.get("--system-file")) {
        (Some(_), Some(_)) => Err(Error::usage("--system and --system-file exclude each other")),
        (text, None) => Ok(text.map(String::from)),
        (None, Some(path)) => load::read_text(path, SYSTEM_BYTES_MAX).map(Some),
    }
}

/// Tokens that structure a conversation.
struct Markers {
    user: u32,
    think: u32,
    end_think: u32,
}

impl Markers {
    fn find(tokenizer: &Tokenizer) -> Result<Markers> {
        let id = |name| match tokenizer.token_id(name) {
            Some(id) => Ok(id),
            None => bail!("the tokenizer has no token {name}, which the template needs"),
        };
        Ok(Markers { user: id("<|user|>")?, think: id("<think>")?, end_think: id("</think>")? })
    }
}

/// A conversation.
struct Chat<'a> {
    engine: &'a Engine,
    tokenizer: &'a Tokenizer,
    session: Session<'a>,
    sampler: Sampler,
    system: Option<String>,
    thinks: bool,
    new_tokens: usize,
    stops: Vec<String>,
    markers: Markers,
    /// A person types.
    on_terminal: bool,
    /// Where each turn is saved to.
    file: Option<PathBuf>,
    /// All that was said. Empty, or with at least one message.
    tokens: Vec<u32>,
    /// Of the last reply, which may go on.
    painter: Painter,
    total: Work,
}

impl<'a> Chat<'a> {
    /// Takes entries until they end. What goes wrong ends a script, and is only said to a person.
    fn talk(&mut self, mut input: Input<Stdin>) -> Result<()> {
        if self.on_terminal {
            let (ctx, thinks) = (self.ctx(), if self.thinks { "on" } else { "off" });
            tell(&format!("context {ctx} tokens, thinking {thinks}; /help lists the commands"));
        }
        loop {
            let done = match input.entry()? {
                Entry::End => return Ok(()),
                Entry::Command(name, _) if name == "/quit" => return Ok(()),
                Entry::Command(name, rest) => self.command(&name, &rest),
                Entry::Message(text) => self.say(&text),
                Entry::Refused(why) => Err(Error::new(why)),
            };
            match done {
                Ok(()) => {}
                Err(error) if self.on_terminal => {
                    sys::clear_interrupt();
                    note_error(&error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Does what a command says.
    fn command(&mut self, name: &str, rest: &str) -> Result<()> {
        let words = COMMANDS.iter().map(|(usage, _)| usage.split_once(' ').unwrap_or((usage, "")));
        let Some((_, kind)) = words.clone().find(|(known, _)| *known == name) else {
            let hint = hint(name, words.map(|(known, _)| known));
            bail!("unknown command {name}{hint} (/help lists them; // starts a message with /)");
        };
        match (kind, rest) {
            ("", "") => {}
            ("", _) => bail!("{name} takes nothing behind it, found {rest:?}"),
            (_, "") => bail!("{name} needs a {kind}"),
            _ => {}
        }
        match name {
            "/more" if self.tokens.is_empty() => bail!("nothing was said that could go on"),
            "/more" => self.reply()?,
            "/undo" => self.undo()?,
            "/reset" => {
                self.tokens.clear();
                tell("a new conversation");
                if let Some(file) = &self.file {
                    tell(&format!("{} has the old one until the next reply", file.display()));
                }
            }
            "/save" => {
                let tokens = self.save(Path::new(rest))?;
                self.session.release_file();
                tell(&format!("{rest} has {tokens} tokens"));
            }
            "/load" => self.load(Path::new(rest))?,
            "/stats" => {
                tell(&self.figures(&self.total, Default::default()));
            }
            _ => {
                let lines = COMMANDS.map(|(usage, help)| format!("{usage:<12} {help}\n"));
                note(&(lines.concat() + HELP_TAIL));
            }
        }
        Ok(())
    }

    /// Drops everything from the last message on.
    fn undo(&mut self) -> Result<()> {
        let is_user = |id: &u32| *id == self.markers.user;
        let Some(last) = self.tokens.iter().rposition(is_user) else {
            bail!("nothing was said that could be dropped");
        };
        let is_first = !self.tokens[..last].iter().any(is_user);
        self.tokens.truncate(if is_first { 0 } else { last });
        tell(&format!("dropped; {} tokens remain", self.tokens.len()));
        Ok(())
    }

    /// Goes on with the conversation of `--session`, if there is one.
    fn resume(&mut self) -> Result<()> {
        let Some(file) = self.file.clone().filter(|file| sys::is_present(file)) else {
            return Ok(());
        };
        self.load(&file)?;
        if self.system.is_some() {
            tell("it was begun before this --system, which counts from /reset on");
        }
        tell("/reset, or deleting the file, starts anew");
        Ok(())
    }

    /// Goes on with a saved conversation. Error: it cannot be; this one goes on then.
    fn load(&mut self, file: &Path) -> Result<()> {
        self.session.release_file();
        let Some((session, restored)) = self.engine.restore(file)? else {
            bail!("{}: no saved conversation", file.display());
        };
        if !session.tokens().contains(&self.markers.user) {
            bail!("{}: a saved session, but no conversation", file.display());
        }
        self.tokens = session.tokens().to_vec();
        self.session = session;
        tell(&load::resumed(file, &restored));
        Ok(())
    }

    /// Saves the conversation; returns its tokens. The last token of a reply that was cut was drawn
    /// and not yet run, so it is run for its rows, unless the context is full.
    fn save(&mut self, file: &Path) -> Result<usize> {
        let tokens = &self.tokens[..self.tokens.len().min(self.ctx())];
        if tokens.is_empty() {
            bail!("nothing was said that could be saved");
        }
        if self.session.tokens() != tokens {
            let mut watch = self.watch(tokens);
            self.session.advance(tokens, &mut watch)?;
        }
        Ok(self.session.save(file)?.tokens)
    }

    /// Positions that the session can hold.
    fn ctx(&self) -> usize {
        self.engine.options().ctx_tokens
    }

    /// Whether what comes next is reasoning: a reply that was cut in it has not closed it.
    fn is_thinking(&self) -> bool {
        let Markers { think, end_think, .. } = self.markers;
        let last = self.tokens.iter().rfind(|id| [think, end_think].contains(id));
        last == Some(&think)
    }

    /// Says `text` to the model and lets it reply. Error: it does not fit the context; nothing is
    /// changed then.
    fn say(&mut self, text: &str) -> Result<()> {
        let mut messages = Vec::new();
        if let (Some(system), true) = (&self.system, self.tokens.is_empty()) {
            messages.push(("system", system.as_str()));
        }
        messages.push(("user", text));
        let request = load::request(&messages, self.thinks);
        let rendered = chat::render(&request)?.ids(self.tokenizer)?;
        let mut behind = &rendered[..];
        let mut tokens = self.tokens.clone();
        if !tokens.is_empty() {
            let start = rendered.iter().position(|id| *id == self.markers.user);
            behind = &rendered[start.unwrap_or(0)..];
            tokens.extend(self.is_thinking().then_some(self.markers.end_think));
        }
        tokens.extend_from_slice(behind);
        let (used, more, ctx) = (self.tokens.len(), behind.len(), self.ctx());
        if tokens.len() > ctx {
            bail!(
                "the message was not sent: its {more} tokens do not fit the context of {ctx}, of \
                 which {used} are used; /undo drops the last exchange, /reset all, and a larger \
                 --ctx has more room"
            );
        }
        self.tokens = tokens;
        self.painter = Painter::new(Look::of_stdout());
        let opening = if self.thinks { self.painter.opening() } else { "" };
        print_text(opening)?;
        self.reply()
    }

    /// Shows how far a pass over `tokens` is.
    fn watch(&self, tokens: &[u32]) -> Watch<'a> {
        let mut watch = Watch::new(self.engine, tokens.len());
        watch.keep(common_tokens(self.session.tokens(), tokens));
        watch
    }

    /// Lets the model go on from where the tokens end, and saves what it said, stopped or not. A
    /// message that it has not read to the end is not saved.
    fn reply(&mut self) -> Result<()> {
        let (ctx, before) = (self.ctx(), self.tokens.len());
        if before > ctx {
            bail!("the context of {ctx} tokens is full: /undo, /reset, or a larger --ctx");
        }
        let counters = (self.engine.expert_counters(), self.session.draft_counters());
        let (work, result) = self.generate();
        let is_stopped = sys::interrupted();
        if is_stopped {
            sys::clear_interrupt();
        }
        let file = self.file.clone().filter(|_| work.new_tokens > 0);
        let saved = file.map_or(Ok(0), |file| self.save(&file));
        let new_tokens = work.new_tokens;
        match result {
            _ if is_stopped && !self.on_terminal => return Err(Error::interrupted()),
            Ok(Finish::Stop) => {}
            Ok(Finish::Length) if self.tokens.len() >= ctx => {
                tell(&format!("the context of {ctx} tokens is full: /undo or /reset makes room"));
            }
            Ok(Finish::Length) => tell(&format!("cut at {new_tokens} tokens (-n): /more goes on")),
            Err(_) if is_stopped => {
                tell("stopped: /more goes on, /undo takes the message back");
            }
            Err(error) => return Err(error),
        }
        self.total.add(&work);
        if self.on_terminal {
            tell(&self.figures(&work, counters));
        }
        saved.map(|_| ())
    }

    /// Appends a reply to the tokens, as far as it comes, and shows it.
    fn generate(&mut self) -> (Work, Result<Finish>) {
        let prompt = self.tokens.clone();
        let mut reply = Reply::new(self.tokenizer, self.is_thinking(), &self.stops);
        let mut watch = self.watch(&prompt);
        let Chat { session, sampler, tokens, painter, .. } = self;
        let kept = common_tokens(session.tokens(), &prompt);
        let result = session.generate(&prompt, self.new_tokens, sampler, &mut watch, |id, _| {
            tokens.push(id);
            let was_thinking = reply.is_thinking();
            print_text(&painter.piece(&reply.push(id), was_thinking, reply.is_thinking()))?;
            Ok(!reply.stopped())
        });
        let [prefill_s, decode_s] = watch.seconds();
        watch.clear();
        let was_thinking = reply.is_thinking();
        let rest = reply.finish(*result.as_ref().unwrap_or(&Finish::Length));
        let rest = painter.piece(&rest, was_thinking, was_thinking) + painter.end() + "\n";
        let shown = print_text(&rest);
        let result = result.and_then(|finish| shown.map(|()| finish));
        // Fewer than all of it where it was stopped.
        let prompt_tokens = session.tokens().len().min(prompt.len()).saturating_sub(kept);
        let new_tokens = tokens.len() - prompt.len();
        let decoded_tokens = new_tokens.saturating_sub(1);
        (Work { prompt_tokens, prefill_s, new_tokens, decoded_tokens, decode_s }, result)
    }

    /// What `work` took, where the counters of experts and drafts stood so before it.
    fn figures(&self, work: &Work, before: (experts::Counters, draft::Counters)) -> String {
        let (experts, drafts) = before;
        let per_second = work.decoded_tokens as f64 / work.decode_s.max(1e-9);
        let now = self.engine.expert_counters();
        let (hits, misses) = (now.hits - experts.hits, now.misses - experts.misses);
        let hit_percent = 100.0 * hits as f64 / (hits + misses).max(1) as f64;
        let read = gb((now.bytes_read - experts.bytes_read) as usize);
        let now = self.session.draft_counters();
        let accepted = now.accepted - drafts.accepted;
        let proposed = now.proposed - drafts.proposed;
        format!(
            "{} tokens, {per_second:.2} tok/s · prompt {} tokens in {:.1} s · experts \
             {hit_percent:.0} % from memory, {read} read · drafts {accepted} of {proposed} · \
             memory {} at most · context {} of {}",
            work.new_tokens,
            work.prompt_tokens,
            work.prefill_s,
            gb(sys::peak_rss_bytes()),
            self.tokens.len(),
            self.ctx(),
        )
    }
}

/// Tokens and seconds of one reply, or of all.
#[derive(Default)]
struct Work {
    /// Those that were not in the cache.
    prompt_tokens: usize,
    prefill_s: f64,
    new_tokens: usize,
    /// New tokens behind the first of each reply, which costs no more than the prompt.
    decoded_tokens: usize,
    decode_s: f64,
}

impl Work {
    fn add(&mut self, other: &Work) {
        self.prompt_tokens += other.prompt_tokens;
        self.prefill_s += other.prefill_s;
        self.new_tokens += other.new_tokens;
        self.decoded_tokens += other.decoded_tokens;
        self.decode_s += other.decode_s;
    }
}

/// A note that is none of the model's words.
fn tell(text: &str) {
    note(&format!("[{text}]\n"));
}
