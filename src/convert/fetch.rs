//! A checkpoint that is fetched while it is converted, a shard at a time, through the system's
//! `curl`: the standard library speaks no TLS.
//!
//! Planning needs headers alone. So every shard is first laid out as a file of its full length
//! with nothing but its header (and the scalars of NVFP4, which plans hold) in it, a hole
//! elsewhere; under the name of the shard stands a link to that file, and what plans from a
//! directory plans from this one. A shard that is needed is written as `NAME.partial`, from where
//! an earlier run stopped, and takes the place of its link once it is whole and has that header.
//!
//! `curl` writes to us, never to a file: it ends when we do, and what the server says is known
//! before a byte is kept. Its settings go through its standard input, for arguments can be read by
//! every user, and the token is in no message. Refused: a server without ranges, a name that is
//! more than a name, a file of another length or header than was planned with.

#![forbid(unsafe_code)]

use super::manifest::{Manifest, PARTIAL, Record};
use super::pipeline::check_interrupt;
use super::writer::check_room;
use super::{METADATA_BYTES_MAX, METADATA_FILES, Request};
use crate::bail;
use crate::config::Config;
use crate::error::{Context, Error, Result};
use crate::json::{self, Limits, Value};
use crate::safetensors::{Directory, Tensor};
use crate::sys;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Where checkpoints are fetched from unless told otherwise.
pub const DEFAULT_BASE_URL: &str = "https://huggingface.co";
/// Directory within the output's that holds what was fetched, until the end.
pub const DIR_NAME: &str = ".coli_source";

/// Within [`DIR_NAME`]: the files that hold a header and a hole.
const HEADERS: &str = "headers";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// The one shard of a checkpoint without an index.
const SINGLE_FILE: &str = "model.safetensors";
/// What is asked for at first, in the hope that the whole header is in it.
const HEAD_BYTES: u64 = 256 << 10;
/// Spans that lie closer than this are fetched as one.
const GAP_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: usize = 1 << 20;
/// Longest lines that precede a body, all redirects together.
const HEAD_LINES_BYTES_MAX: u64 = 1 << 20;
/// Failures in a row, without a byte between them, after which a shard is given up.
const FAILURES_MAX: u32 = 10;
/// Longest pause between two attempts; the first is one second, each next one twice as long.
const PAUSE_MAX: Duration = Duration::from_secs(64);

/// A checkpoint on a server that keeps it as `BASE/NAME/resolve/main/FILE`.
#[derive(Clone)]
pub struct Repo {
    /// `OWNER/NAME`.
    pub name: String,
    base_url: String,
    token: Option<String>,
}

/// How a transfer ended that was not refused for good.
enum Answer {
    /// All of it came; the length of the file.
    Whole(u64),
    /// There is no such file.
    Absent,
    /// It may go better next time.
    Broken(String),
}

impl Repo {
    /// The checkpoint `name` of a server; `token` opens what is not public.
    pub fn new(base_url: &str, name: &str, token: Option<String>) -> Result<Repo> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"\"\\".contains(&byte);
        let scheme = base_url.split_once("://").map(|(scheme, _)| scheme);
        if !matches!(scheme, Some("http" | "https")) || !base_url.bytes().all(is_plain) {
            bail!("expected an http:// or https:// address, found {base_url:?}");
        }
        if name.split('/').count() > 2 || !name.split('/').all(is_name) {
            bail!("expected the name of a checkpoint, as OWNER/NAME, found {name:?}");
        }
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        if token.iter().any(|token| !token.bytes().all(is_plain)) {
            bail!("the token has characters that no token has");
        }
        let base_url = base_url.trim_end_matches('/').into();
        Ok(Repo { name: name.into(), base_url, token })
    }

    /// Fetches what a plan is made from into `request.from`, unless it is there: the files beside
    /// the tensors, and the header of every shard that unfinished outputs need; nothing when there
    /// are none. `on_header` hears how many of how many shards are done.
    pub fn prepare(
        &self,
        request: &Request,
        mut on_header: impl FnMut(usize, usize),
    ) -> Result<()> {
        let dir = &request.from;
        let begun = Manifest::read(&request.to)?;
        let is_made = |output: &Record| {
            output.hash.is_some() && sys::is_present(&request.to.join(&output.name))
        };
        if begun.iter().any(|begun| begun.outputs.iter().all(is_made)) {
            return Ok(());
        }
        std::fs::create_dir_all(dir.join(HEADERS)).context(|| dir.display())?;
        for name in METADATA_FILES {
            let answer = self.fetch_small(dir, name)?;
            // All others may be absent.
            if name == "config.json" {
                self.whole(name, answer)?;
            }
        }
        // Another family is refused before any shard is asked for.
        Config::load(dir)?;
        let is_done = |name: &str| {
            let begun = begun.as_ref()?;
            let source = begun.sources.iter().position(|source| source.name == name)?;
            let mut made = begun.outputs.iter().filter(|output| output.needs.contains(&source));
            Some(made.all(is_made))
        };
        let names = self.shards(dir)?;
        for (i, name) in names.iter().enumerate() {
            if !sys::is_present(&dir.join(name)) && is_done(name) != Some(true) {
                self.lay_out(dir, name)?;
            }
            on_header(i + 1, names.len());
        }
        Ok(())
    }

    /// Makes a shard whole. `on_bytes` hears of what comes. Errors: no room beside what stays
    /// free; a server that fails too often; another file than was planned with.
    pub fn fetch(
        &self,
        request: &Request,
        name: &str,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let path = request.from.join(name);
        if !path.is_symlink() {
            return Ok(());
        }
        let all_bytes = path.metadata().context(|| path.display())?.len();
        let partial = request.from.join(format!("{name}{PARTIAL}"));
        let file = File::options().append(true).create(true).open(&partial);
        let mut file = file.context(|| partial.display())?;
        let mut at = file.metadata().context(|| partial.display())?.len();
        check_room(request, name, all_bytes.saturating_sub(at))?;
        let mut failures = 0;
        while at < all_bytes {
            let before = at;
            let answer = self.get(name, at..u64::MAX, Some(all_bytes), &mut |bytes| {
                file.write_all(bytes).context(|| partial.display())?;
                at += bytes.len() as u64;
                on_bytes(bytes.len() as u64);
                Ok(())
            })?;
            failures = if at > before { 1 } else { failures + 1 };
            match answer {
                Answer::Broken(_) if failures < FAILURES_MAX => pause(failures)?,
                answer => _ = self.whole(name, answer)?,
            }
        }
        file.sync_all().context(|| partial.display())?;
        let open = |path: &PathBuf| Directory::open_files(path, std::slice::from_ref(path));
        if !open(&partial)?.iter().eq(open(&path)?.iter()) {
            bail!(
                "{}: other tensors than planned with: delete it, and run the same command again",
                partial.display()
            );
        }
        let header = path.canonicalize().context(|| path.display())?;
        std::fs::rename(&partial, &path).context(|| path.display())?;
        std::fs::remove_file(&header).context(|| header.display())
    }

    fn url_of(&self, file: &str) -> String {
        format!("{}/{}/resolve/main/{file}", self.base_url, self.name)
    }

    /// The length of a file that came whole.
    fn whole(&self, name: &str, answer: Answer) -> Result<u64> {
        match answer {
            Answer::Whole(all_bytes) => Ok(all_bytes),
            Answer::Absent => bail!("{}: HTTP status 404: check --repo", self.url_of(name)),
            Answer::Broken(why) => {
                bail!("{}: {why}: run the same command again later", self.url_of(name))
            }
        }
    }

    /// Fetches a file that is no shard, unless it is there.
    fn fetch_small(&self, dir: &Path, name: &str) -> Result<Answer> {
        let path = dir.join(name);
        if let Ok(found) = path.metadata() {
            return Ok(Answer::Whole(found.len()));
        }
        let mut text = Vec::new();
        let answer = self.append(name, 0..u64::MAX, &mut text)?;
        if let Answer::Whole(_) = answer {
            sys::replace_file(&path, &text).context(|| path.display())?;
        }
        Ok(answer)
    }

    /// Names of the shards, by the index.
    fn shards(&self, dir: &Path) -> Result<BTreeSet<String>> {
        let answer = self.fetch_small(dir, INDEX_FILE)?;
        if let Answer::Absent = answer {
            return Ok(BTreeSet::from([SINGLE_FILE.into()]));
        }
        self.whole(INDEX_FILE, answer)?;
        let path = dir.join(INDEX_FILE);
        let text = sys::read_file(&path, METADATA_BYTES_MAX).context(|| path.display())?;
        let index = json::parse(&text, Limits::default()).context(|| path.display())?;
        let files = index.get("weight_map").and_then(Value::as_object).unwrap_or_default();
        let shard = |(tensor, file): &(String, Value)| match file.as_str() {
            Some(name) if is_name(name) && name.ends_with(".safetensors") => Ok(name.to_string()),
            _ => bail!("{}: weight_map: {tensor}: not the name of a shard", path.display()),
        };
        files.iter().map(shard).collect()
    }

    /// Lays a shard out: its header and what plans read beyond it, in a file of its full length.
    fn lay_out(&self, dir: &Path, name: &str) -> Result<()> {
        let append = |range, to: &mut Vec<u8>| self.whole(name, self.append(name, range, to)?);
        let mut head = Vec::new();
        let all_bytes = append(0..HEAD_BYTES, &mut head)?;
        let word = head.first_chunk().map_or(u64::MAX, |word| u64::from_le_bytes(*word));
        let head_bytes = word.saturating_add(8);
        if head_bytes > all_bytes {
            bail!("{}: {all_bytes} bytes are no safetensors file", self.url_of(name));
        }
        if head_bytes > head.len() as u64 {
            append(head.len() as u64..head_bytes, &mut head)?;
        }
        head.truncate(head_bytes as usize);
        let path = dir.join(HEADERS).join(name);
        let file = File::create(&path).context(|| path.display())?;
        let write =
            |offset, bytes: &[u8]| file.write_all_at(bytes, offset).context(|| path.display());
        write(0, &head)?;
        file.set_len(all_bytes).context(|| path.display())?;
        let directory = Directory::open_files(dir, std::slice::from_ref(&path))?;
        let scalars = directory.iter().filter(|(tensor, _)| tensor.ends_with("_scale_2"));
        let scalars: Vec<&Tensor> = scalars.map(|(_, tensor)| tensor).collect();
        for near in scalars.chunk_by(|a, b| b.offset - a.offset <= GAP_BYTES) {
            let [first, last] = [near[0], near[near.len() - 1]];
            let mut bytes = Vec::new();
            append(first.offset..last.offset + last.bytes, &mut bytes)?;
            write(first.offset, &bytes)?;
        }
        file.sync_all().context(|| path.display())?;
        let link = dir.join(name);
        symlink(Path::new(HEADERS).join(name), &link).context(|| link.display())
    }

    /// Appends a range of a file, which may end before it.
    fn append(&self, name: &str, range: Range<u64>, to: &mut Vec<u8>) -> Result<Answer> {
        self.get(name, range, None, &mut |bytes| {
            to.extend_from_slice(bytes);
            if to.len() > METADATA_BYTES_MAX {
                bail!("{}: more than {METADATA_BYTES_MAX} bytes", self.url_of(name));
            }
            Ok(())
        })
    }

    /// Asks for a range of a file, once, and hands what comes to `sink`. An end of `u64::MAX` is
    /// that of the file. Errors, besides those of `sink`: a status that will not change by itself;
    /// a server that ignores the range, or whose file is not of `all_bytes`.
    fn get(
        &self,
        name: &str,
        range: Range<u64>,
        all_bytes: Option<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<Answer> {
        let url = self.url_of(name);
        let mut curl = Curl::start(self, &url, &range)?;
        let Some(head) = curl.head().context(|| &url)? else {
            return Ok(Answer::Broken(curl.end()?.unwrap_or("no answer came".into())));
        };
        match head.status {
            206 if head.found.is_some_and(|(start, _)| start == range.start) => {}
            200 if range == (0..u64::MAX) => {}
            200 | 206 => bail!(
                "{url}: HTTP status {}: the server gives no ranges: fetch the checkpoint in \
                 another way, and convert it with --from",
                head.status
            ),
            401 | 403 => bail!("{url}: HTTP status {}: HF_TOKEN must open it", head.status),
            404 => return Ok(Answer::Absent),
            408 | 429 | 500.. => return Ok(Answer::Broken(format!("HTTP status {}", head.status))),
            status => bail!("{url}: HTTP status {status}"),
        }
        let found = head.found.map_or(u64::MAX, |(_, length)| length);
        if let Some(all_bytes) = all_bytes.filter(|all_bytes| *all_bytes != found) {
            bail!(
                "{url}: expected {all_bytes} bytes, the server has {found}: it was changed: begin \
                 anew, in another --to"
            );
        }
        let mut buffer = vec![0; BLOCK_BYTES];
        let end = range.end.min(found);
        let mut at = range.start;
        loop {
            check_interrupt()?;
            let count = curl.body.read(&mut buffer).context(|| &url)?;
            if count == 0 {
                break;
            }
            at += count as u64;
            if at > end {
                bail!("{url}: more than {end} bytes came");
            }
            sink(&buffer[..count])?;
        }
        Ok(match curl.end()? {
            Some(why) => Answer::Broken(why),
            None if at < end && end < u64::MAX => {
                Answer::Broken(format!("{at} of {end} bytes came"))
            }
            None => Answer::Whole(found),
        })
    }
}

/// What precedes a body.
#[derive(Default)]
struct Head {
    status: u16,
    /// First byte of the body, and length of the file.
    found: Option<(u64, u64)>,
}

/// A running `curl`, which ends with this.
struct Curl {
    child: Child,
    body: BufReader<ChildStdout>,
}

impl Curl {
    fn start(repo: &Repo, url: &str, range: &Range<u64>) -> Result<Curl> {
        // A redirect must not carry a token out of TLS.
        let schemes = if url.starts_with("https:") { "https" } else { "http,https" };
        let mut config = format!(
            "url = \"{url}\"\ninclude\nlocation\ngloboff\nno-buffer\nsilent\nshow-error\n\
             suppress-connect-headers\nproto-redir = \"={schemes}\"\nconnect-timeout = 30\n\
             speed-limit = 1\nspeed-time = 60\n"
        );
        if *range != (0..u64::MAX) {
            let last = if range.end < u64::MAX { &*(range.end - 1).to_string() } else { "" };
            config += &format!("range = {}-{last}\n", range.start);
        }
        if let Some(token) = &repo.token {
            config += &format!("header = \"Authorization: Bearer {token}\"\n");
        }
        let mut command = Command::new("curl");
        // Its own settings file could make it print what it sends.
        command.args(["-q", "--config", "-"]).env_remove("HF_TOKEN");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(format!(
                "curl is not installed, and nothing else here speaks TLS. Install it, or fetch \
                 the checkpoint in another way and convert it then:\n  git clone {}/{} DIR\n  \
                 coli convert --from DIR --to TO --delete-source",
                repo.base_url, repo.name
            )),
            _ => Error::from(error).context("curl"),
        })?;
        let (stdin, body) = (child.stdin.take(), child.stdout.take());
        let body = BufReader::new(body.expect("asked for above"));
        // If it ended already, it says why.
        let _ = stdin.expect("asked for above").write_all(config.as_bytes());
        Ok(Curl { child, body })
    }

    /// Reads what precedes the body, that of the last answer where one redirects to another.
    /// `None`: no whole answer came.
    fn head(&mut self) -> Result<Option<Head>> {
        let mut head = Head::default();
        for line in (&mut self.body).take(HEAD_LINES_BYTES_MAX).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).trim_end().to_ascii_lowercase();
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            match name {
                "" if matches!(head.status, 100..200 | 300..400) => {}
                "" => return Ok(Some(head)),
                "content-length" if head.status == 200 => {
                    head.found = value.trim().parse().ok().map(|length| (0, length));
                }
                "content-range" => head.found = parse_range(value.trim()),
                _ if name.starts_with("http/") => {
                    let status = name.split(' ').nth(1).and_then(|word| word.parse().ok());
                    head = Head { status: status.unwrap_or(0), ..Head::default() };
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// Waits for its end; what it says if it failed.
    fn end(&mut self) -> Result<Option<String>> {
        let mut notes = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            stderr.take(HEAD_LINES_BYTES_MAX).read_to_string(&mut notes).context(|| "curl")?;
        }
        let status = self.child.wait().context(|| "curl")?;
        // The terminal interrupts it along with us.
        check_interrupt()?;
        let why = || notes.lines().last().map_or(format!("curl: {status}"), String::from);
        Ok((!status.success()).then(why))
    }
}

impl Drop for Curl {
    fn drop(&mut self) {
        // It may have ended.
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// `bytes 5-9/100`: 5 and 100.
fn parse_range(value: &str) -> Option<(u64, u64)> {
    let (span, length) = value.strip_prefix("bytes ")?.split_once('/')?;
    Some((span.split_once('-')?.0.parse().ok()?, length.parse().ok()?))
}

/// Whether it is one name, and needs no quoting in a URL or a settings file.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !text.is_empty() && !text.starts_with('.') && text.bytes().all(is_plain)
}

/// Waits after the `failures`th failure in a row.
fn pause(failures: u32) -> Result<()> {
    let end = Instant::now() + PAUSE_MAX.min(Duration::from_secs(1 << (failures - 1)));
    while Instant::now() < end {
        check_interrupt()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
