//! A directory of saved sessions under a budget of bytes. Names are numbers that say nothing of
//! what the sessions hold.

#![forbid(unsafe_code)]

use super::{Journal, Shape, common_tokens};
use crate::error::{Context, Result};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Ending of the files; others are left alone.
const EXTENSION: &str = "coli-kv";

/// The sessions of one model in a directory.
pub struct Sessions {
    dir: PathBuf,
    budget_bytes: u64,
    shape: Shape,
}

/// One of the files.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Sessions {
    /// Makes the directory where there is none.
    pub fn new(dir: &Path, budget_bytes: u64, shape: Shape) -> Result<Sessions> {
        std::fs::create_dir_all(dir).context(|| dir.display())?;
        Ok(Sessions { dir: dir.to_path_buf(), budget_bytes, shape })
    }

    /// Files of sessions, of any model, the one used last in front.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        Ok(self.entries()?.into_iter().map(|entry| entry.path).collect())
    }

    /// The session that shares most tokens with the start of `prompt`, and how many; none of those
    /// `in_use`.
    pub fn find(&self, prompt: &[u32], in_use: &[PathBuf]) -> Result<Option<(PathBuf, usize)>> {
        let common = |path: PathBuf| {
            let tokens = Journal::peek(&path, self.shape).ok()?;
            Some((path, common_tokens(&tokens, prompt))).filter(|(_, common)| *common > 0)
        };
        let free = self.list()?.into_iter().rev().filter(|path| !in_use.contains(path));
        Ok(free.filter_map(common).max_by_key(|(_, common)| *common))
    }

    /// Path of a new session.
    pub fn fresh(&self) -> PathBuf {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64);
        let name = |id: u64| self.dir.join(format!("{id:016x}.{EXTENSION}"));
        (now..).map(name).find(|path| !path.exists()).expect("not all numbers are taken")
    }

    /// Notes that a session is used now.
    pub fn touch(&self, path: &Path) -> Result<()> {
        let file = std::fs::File::open(path);
        file.and_then(|file| file.set_modified(SystemTime::now())).context(|| path.display())
    }

    /// Deletes the sessions that were not used for longest until the others fit the budget;
    /// `protected` ones stay. Returns what was deleted.
    pub fn evict(&self, protected: &[&Path]) -> Result<Vec<PathBuf>> {
        let mut entries = self.entries()?;
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.retain(|entry| !protected.contains(&entry.path.as_path()));
        let mut deleted = Vec::new();
        while bytes > self.budget_bytes
            && let Some(Entry { path, bytes: freed, .. }) = entries.pop()
        {
            std::fs::remove_file(&path).context(|| path.display())?;
            bytes -= freed;
            deleted.push(path);
        }
        Ok(deleted)
    }

    fn entries(&self) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&self.dir).context(|| self.dir.display())? {
            let path = entry?.path();
            let is_ours = path.extension().is_some_and(|extension| extension == EXTENSION);
            // Another process may have deleted it.
            let Ok(metadata) = path.metadata() else { continue };
            if is_ours && metadata.is_file() {
                let used = metadata.modified().unwrap_or(UNIX_EPOCH);
                entries.push(Entry { path, bytes: metadata.len(), used });
            }
        }
        entries.sort_by(|a, b| (b.used, &b.path).cmp(&(a.used, &a.path)));
        Ok(entries)
    }
}
