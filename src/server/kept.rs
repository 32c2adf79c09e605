//! Conversations that outlive the server: each slot's session is saved when its reply is whole, and
//! a prompt that no slot knows is looked for among those that were saved.
//!
//! Nothing here can fail a request: what cannot be saved or restored is logged, and computed anew.

#![forbid(unsafe_code)]

use crate::engine::{Engine, Session};
use crate::error::Result;
use crate::state::{Sessions, common_tokens};
use std::path::{Path, PathBuf};

/// Tokens that a file must save to be read: fewer are computed about as fast.
const GAIN_TOKENS_MIN: usize = 32;

/// Where sessions are kept.
pub struct Kept {
    sessions: Sessions,
    log: fn(&str),
}

impl Kept {
    /// In `dir`, which is made; the files that were used last, as long as they fit `bytes`.
    pub fn new(engine: &Engine, dir: &Path, bytes: u64, log: fn(&str)) -> Result<Kept> {
        Ok(Kept { sessions: Sessions::new(dir, bytes, engine.saved_shape()?)?, log })
    }

    /// Lets a slot that is about to run `prompt` go of its file, if that is another conversation's.
    /// Asked before anything is copied into the slot, which then holds the start of `prompt`. A
    /// session that a fault has emptied is another conversation, too.
    pub fn let_go(session: &mut Session<'_>, file: &mut Option<PathBuf>, prompt: &[u32]) {
        if common_tokens(session.tokens(), prompt) * 2 <= session.tokens().len() {
            session.release_file();
            *file = None;
        }
    }

    /// Gives a slot that is about to run `prompt` the saved session that has more of its beginning,
    /// if there is one; files of other slots, which are `in_use`, cannot be had.
    pub fn restore(
        &self,
        session: &mut Session<'_>,
        file: &mut Option<PathBuf>,
        prompt: &[u32],
        in_use: &[PathBuf],
    ) {
        let common = common_tokens(session.tokens(), prompt);
        let found = self.sessions.find(prompt, in_use).map(|found| {
            found.filter(|(path, tokens)| {
                *tokens >= common + GAIN_TOKENS_MIN && file.as_ref() != Some(path)
            })
        });
        let restored = found.and_then(|found| {
            let Some((path, _)) = found else { return Ok(None) };
            Ok(session.restore(&path)?.map(|_| path))
        });
        match restored {
            Ok(None) => {}
            Ok(Some(path)) => *file = Some(path),
            Err(error) => (self.log)(&error.to_string()),
        }
    }

    /// Saves a slot's session, and deletes those used least lately that no longer fit; files of
    /// other slots are `in_use`.
    pub fn save(&self, session: &mut Session<'_>, file: &mut Option<PathBuf>, in_use: &[PathBuf]) {
        let saved = self.try_save(session, file, in_use);
        if let Err(error) = saved {
            (self.log)(&error.to_string());
        }
    }

    fn try_save(
        &self,
        session: &mut Session<'_>,
        file: &mut Option<PathBuf>,
        in_use: &[PathBuf],
    ) -> Result<()> {
        let path: &Path = file.get_or_insert_with(|| self.sessions.fresh());
        session.save(path)?;
        self.sessions.touch(path)?;
        let in_use = in_use.iter().map(PathBuf::as_path).chain([path]).collect::<Vec<_>>();
        self.sessions.evict(&in_use).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Options;
    use crate::model::Unobserved;

    #[test]
    fn an_emptied_slot_does_not_save_over_the_conversation_that_it_had() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/a_seed");
        let options = Options { ctx_tokens: 32, threads: 1, ..Options::default() };
        let engine = Engine::open(&dir, options, |_, _| ()).unwrap();
        let mut session = engine.session().unwrap();
        let file = || Some(PathBuf::from("a"));
        session.advance(&[1, 2, 3, 4], &mut Unobserved).unwrap();
        for (prompt, is_kept) in [(&[1, 2, 3, 9][..], true), (&[1, 9], false)] {
            let mut held = file();
            Kept::let_go(&mut session, &mut held, prompt);
            assert_eq!(held.is_some(), is_kept, "{prompt:?}");
        }
        session.clear();
        let mut held = file();
        Kept::let_go(&mut session, &mut held, &[1, 2, 3]);
        assert_eq!(held, None);
    }
}
