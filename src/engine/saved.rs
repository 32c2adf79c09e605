//! Sessions that are saved, restored, and shared between timelines by copying.

#![forbid(unsafe_code)]

use super::{Engine, Head, Session};
use crate::bail;
use crate::error::{Context, Result};
use crate::state::{Fingerprint, Journal, Shape, Timeline, common_tokens};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// A session that came from a file. Whoever shows it to a person says so.
#[derive(Clone, Copy, Debug)]
pub struct Restored {
    /// Tokens of its timeline.
    pub tokens: usize,
    /// Time since it was saved last.
    pub age: Duration,
}

/// A session that is safe in its file.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// Tokens of its timeline.
    pub tokens: usize,
    /// Bytes that had to be written.
    pub bytes_written: u64,
}

impl Engine {
    /// What saved sessions are made for and bound to. Reads some megabytes when first asked, see
    /// [`Fingerprint::of`].
    pub fn saved_shape(&self) -> Result<Shape> {
        let fingerprint = match self.fingerprint.get() {
            Some(known) => *known,
            None => Fingerprint::of(&self.model.directory)?,
        };
        let config = &self.model.config;
        let layers = config.num_layers;
        let indexed = self.model.weights.index_layers().iter().take(layers).filter(|i| **i).count();
        let latent_floats = config.kv_lora_rank + config.qk_rope_head_dim;
        Ok(Shape {
            fingerprint: *self.fingerprint.get_or_init(|| fingerprint),
            vocab_size: config.vocab_size,
            layers,
            position_floats: layers * latent_floats + indexed * config.index_head_dim,
            hidden_size: config.hidden_size,
        })
    }

    /// The session that `path` holds; `None` if there is no file, or nothing valid behind its
    /// header. The draft head goes on where it was, if every record was saved with it; otherwise it
    /// begins behind what was restored. Errors: those of [`Journal::open`]; more tokens than
    /// fit the context.
    pub fn restore(&self, path: &Path) -> Result<Option<(Session<'_>, Restored)>> {
        let mut session = self.session()?;
        Ok(session.restore(path)?.map(|restored| (session, restored)))
    }
}

impl Session<'_> {
    /// Takes the timeline that `path` holds in place of its own, and in the same memory; results
    /// are those of [`Engine::restore`]. Without one this session is as it was, but for a file
    /// that could not be read to its end: then it is empty.
    pub fn restore(&mut self, path: &Path) -> Result<Option<Restored>> {
        self.restore_file(path).context(|| path.display())
    }

    fn restore_file(&mut self, path: &Path) -> Result<Option<Restored>> {
        let shape = self.engine.saved_shape()?;
        let Some(journal) = Journal::open(path, shape)? else { return Ok(None) };
        let (tokens, ctx) = (journal.tokens().len(), self.engine.options.ctx_tokens);
        if tokens == 0 {
            return Ok(None);
        }
        if tokens > ctx {
            bail!("{tokens} tokens do not fit the context of {ctx} (see --ctx)");
        }
        self.clear();
        let hidden = journal.load(&mut self.kv)?;
        if let Some(head) = &mut self.head {
            *head = match hidden {
                Some(hidden) => Head { rows: tokens - 1, hidden, ..Head::default() },
                None => Head { first: tokens, ..Head::default() },
            };
        }
        self.tokens.extend_from_slice(journal.tokens());
        let age = (UNIX_EPOCH + Duration::from_secs(journal.saved_at())).elapsed();
        self.journal = Some(journal);
        Ok(Some(Restored { tokens, age: age.unwrap_or_default() }))
    }

    /// Makes the committed timeline what `path` holds, by appending what is new in it. Errors name
    /// the file, which then holds what it held before; the session can go on.
    pub fn save(&mut self, path: &Path) -> Result<Saved> {
        if self.head.as_ref().is_some_and(|head| head.first == 0) {
            // The head's row of every token whose next one is known.
            self.absorb(1)?;
        }
        let bytes_written = self.save_file(path).context(|| path.display())?;
        Ok(Saved { tokens: self.tokens.len(), bytes_written })
    }

    /// Lets go of the file that it was restored from or saved to last: others may have it then.
    pub fn release_file(&mut self) {
        self.journal = None;
    }

    fn save_file(&mut self, path: &Path) -> Result<u64> {
        if self.tokens.is_empty() {
            return Ok(0);
        }
        let journal = match self.journal.take().filter(|j| j.path() == path && j.is_in_place()) {
            Some(journal) => journal,
            None => Journal::open_or_create(path, self.engine.saved_shape()?)?,
        };
        let whole = self.head.as_ref().filter(|head| head.first == 0);
        let head = whole.map(|head| &head.hidden[..]);
        let timeline = Timeline { tokens: &self.tokens, kv: &self.kv, head };
        self.journal.insert(journal).save(&timeline)
    }

    /// Takes what `from`, a session of the same engine, has of the start of `tokens`, if that is
    /// more than there is already; `tokens` are then advanced to as usual. Returns the tokens that
    /// this timeline now has in common with them.
    pub fn copy_prefix(&mut self, from: &Session<'_>, tokens: &[u32]) -> usize {
        assert!(std::ptr::eq(self.engine, from.engine), "sessions of two engines");
        if tokens.is_empty() {
            return 0;
        }
        let most = tokens.len() - 1;
        let count = from.kept(tokens, most);
        if count > self.kept(tokens, most) {
            self.kv.copy_from(&from.kv, count);
            self.tokens.clear();
            self.tokens.extend_from_slice(&from.tokens[..count]);
            self.head = from.head.clone();
            self.truncate(count);
        }
        common_tokens(&self.tokens, tokens)
    }
}
