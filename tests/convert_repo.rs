//! Conversions of a checkpoint that a server has: the bytes of a local conversion, never more of
//! the source here than was announced, nothing fetched twice, and a token that nobody sees.
//!
//! The server is a thread of the test; the client is the system's `curl`. Without one, the tests
//! that need it print that they were skipped.

mod common;

use colibri::convert::{Class, DIR_NAME, FILE_NAME, Formats, Plan, Repo, Request, Scales};
use colibri::quant::Format;
use common::{TempDir, fixture};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Six BF16 shards.
const SOURCE: &str = "g_bf16_sharded";
const NAME: &str = "owner/model";
const TOKEN: &str = "hf_verySecret-123";
/// Longest wait for anything that must come.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the server does beside what it should.
#[derive(Clone, Default)]
struct Quirks {
    /// Answers whole files, whatever range is asked for.
    no_ranges: bool,
    /// This status for files whose name contains this.
    status: Option<(u16, &'static str)>,
    /// Adds so many bytes to files whose name contains this.
    longer: Option<(usize, &'static str)>,
    /// Breaks connections after so many bytes of one body.
    cut: Option<usize>,
    /// Sends so many bytes of one body and then nothing, so that its client can be killed.
    hang: Option<usize>,
    /// Asks for the token.
    private: bool,
    /// Redirects to another host, which is this one by another name.
    elsewhere: bool,
    /// Where the source is fetched to, so that what is there can be counted.
    watched: Option<PathBuf>,
}

/// One request.
#[derive(Clone, Debug)]
struct Seen {
    file: String,
    /// First byte, and the last one if it was said.
    range: Option<(usize, Option<usize>)>,
    authorization: Option<String>,
    /// Bytes of the body that were sent.
    sent: usize,
    /// Bytes of the source that were there, and those of this file that will be.
    held: u64,
}

/// A server of one checkpoint. Files are found behind a redirect, as where large ones are kept.
struct Server {
    address: SocketAddr,
    log: Arc<Mutex<Vec<Seen>>>,
    quirks: Arc<Mutex<Quirks>>,
}

impl Server {
    fn new(dir: &Path, quirks: Quirks) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (log, quirks) = (Arc::default(), Arc::new(Mutex::new(quirks)));
        let server = Server { address, log: Arc::clone(&log), quirks: Arc::clone(&quirks) };
        let dir = dir.to_path_buf();
        // Ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (dir, log, quirks) = (dir.clone(), Arc::clone(&log), Arc::clone(&quirks));
                thread::spawn(move || answer(stream.unwrap(), &dir, &log, &quirks));
            }
        });
        server
    }

    fn log(&self) -> Vec<Seen> {
        self.log.lock().unwrap().clone()
    }

    fn set(&self, quirks: Quirks) {
        *self.quirks.lock().unwrap() = quirks;
    }

    /// Bytes of shards that were sent, without headers and what else is small.
    fn payload_sent(&self) -> BTreeMap<String, usize> {
        let mut sent = BTreeMap::new();
        for seen in self.log().iter().filter(|seen| seen.is_payload()) {
            *sent.entry(seen.file.clone()).or_default() += seen.sent;
        }
        sent
    }

    /// `coli convert` of what this serves.
    fn command(&self, to: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
        command.args([
            "convert",
            "--repo",
            NAME,
            "--base-url",
            &format!("http://{}", self.address),
        ]);
        command.arg("--to").arg(to).args(["--keep-free", "0"]).args(more).env_remove("HF_TOKEN");
        command.env("NO_PROXY", "*");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn convert(&self, to: &Path, more: &[&str]) -> Output {
        self.command(to, more).output().unwrap()
    }
}

impl Seen {
    fn is_payload(&self) -> bool {
        self.file.ends_with(".safetensors") && self.range.is_none_or(|(_, last)| last.is_none())
    }
}

/// Serves one connection: one request after another.
fn answer(stream: TcpStream, dir: &Path, log: &Mutex<Vec<Seen>>, quirks: &Mutex<Quirks>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut request = Vec::new();
        loop {
            let mut line = String::new();
            if lines.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            match line.trim_end() {
                "" => break,
                line => request.push(line.to_string()),
            }
        }
        let path = request[0].split(' ').nth(1).unwrap().to_string();
        let field = |name: &str| {
            request.iter().find_map(|line| Some(line.strip_prefix(name)?.trim().to_string()))
        };
        let authorization = field("Authorization:");
        let quirks = quirks.lock().unwrap().clone();
        if let Some(file) = path.strip_prefix(&format!("/{NAME}/resolve/main/")) {
            let port = stream.local_addr().unwrap().port();
            let host =
                if quirks.elsewhere { format!("http://localhost:{port}") } else { "".into() };
            let opens = authorization.is_some_and(|given| given == format!("Bearer {TOKEN}"));
            let status = if quirks.private && !opens { "401 No" } else { "302 Found" };
            let to = format!("HTTP/1.1 {status}\r\nLocation: {host}/blobs/{file}\r\n");
            write!(&stream, "{to}Content-Length: 5\r\n\r\nmoved").unwrap();
            continue;
        }
        let range = field("Range: bytes=").map(|range| {
            let (first, last) = range.split_once('-').unwrap();
            (first.parse().unwrap(), last.parse().ok())
        });
        let file = path.strip_prefix("/blobs/").unwrap().to_string();
        let mut seen = Seen { file, range, authorization, sent: 0, held: 0 };
        let (head, body) = respond(&mut seen, dir, &quirks);
        let is_payload = seen.is_payload() && head.starts_with("HTTP/1.1 20");
        let cut = quirks.cut.or(quirks.hang).filter(|cut| is_payload && *cut < body.len());
        let body = &body[..cut.unwrap_or(body.len())];
        seen.sent = body.len();
        log.lock().unwrap().push(seen);
        let written = (&stream).write_all(head.as_bytes()).and_then(|()| (&stream).write_all(body));
        if cut.is_some() && quirks.hang.is_some() {
            // Until the client is gone.
            let _ = lines.read_line(&mut String::new());
        }
        if written.is_err() || cut.is_some() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

/// Head and body of the answer to a request.
fn respond(seen: &mut Seen, dir: &Path, quirks: &Quirks) -> (String, Vec<u8>) {
    let wrong = |status: u16| {
        (format!("HTTP/1.1 {status} No\r\nContent-Length: 2\r\n\r\n"), b"no".to_vec())
    };
    if let Some((status, name)) = quirks.status
        && seen.file.contains(name)
    {
        return wrong(status);
    }
    let Ok(mut bytes) = fs::read(dir.join(&seen.file)) else { return wrong(404) };
    let extra = quirks.longer.filter(|(_, name)| seen.file.contains(name)).map_or(0, |(n, _)| n);
    bytes.resize(bytes.len() + extra, 0);
    let length = bytes.len();
    let others = quirks.watched.iter().flat_map(|dir| held(dir)).filter(|(n, _)| *n != seen.file);
    seen.held = others.map(|(_, bytes)| bytes).sum::<u64>() + length as u64;
    match seen.range.filter(|_| !quirks.no_ranges) {
        None => (format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"), bytes),
        Some((first, _)) if first >= bytes.len() => wrong(416),
        Some((first, last)) => {
            let last = last.unwrap_or(usize::MAX).min(bytes.len() - 1);
            let body = bytes[first..=last].to_vec();
            let head = format!(
                "HTTP/1.1 206 Partial\r\ncontent-range: bytes {first}-{last}/{length}\r\n\
                 Content-Length: {}\r\n\r\n",
                body.len()
            );
            (head, body)
        }
    }
}

/// Names and lengths of the shards in a directory, whole or begun; links to headers are none.
fn held(dir: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let name = name.strip_suffix(".partial").unwrap_or(&name);
        // It may be renamed meanwhile.
        let Ok(file) = entry.path().symlink_metadata() else { continue };
        if name.ends_with(".safetensors") && file.is_file() {
            *found.entry(name.to_string()).or_default() += file.len();
        }
    }
    found
}

/// The `curl` of this machine. A test without it ends, and says so past the test harness.
fn curl() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|dir| dir.join("curl")).find(|file| file.is_file());
    if found.is_none() {
        std::io::stderr().write_all(b"SKIPPED: this machine has no curl\n").unwrap();
    }
    found
}

/// Name and content of what a conversion made, without its record.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap()).filter(|name| name != FILE_NAME);
    names.map(|name| (name.clone(), fs::read(dir.join(&name)).unwrap())).collect()
}

fn succeeded(output: Output) -> String {
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{notes}");
    String::from_utf8(output.stdout).unwrap()
}

/// The last line of a failed conversion.
fn refusal(output: Output) -> String {
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{notes}");
    notes.lines().last().unwrap().to_string()
}

/// What a conversion of the fixture on this machine gives.
fn local(test: &str, name: &str, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let to = TempDir::new(&format!("{test}-local"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.arg("convert").arg("--from").arg(fixture(name)).arg("--to").arg(&to.0);
    succeeded(command.args(["--keep-free", "0"]).args(more).output().unwrap());
    contents(&to.0)
}

/// Length of every shard of a fixture.
fn lengths(name: &str) -> BTreeMap<String, usize> {
    let all = held(&fixture(name)).into_iter();
    all.map(|(name, bytes)| (name, bytes as usize)).collect()
}

/// Bytes that a plan will fetch, and that will be there at a time, to the byte.
fn announced(server: &Server, to: &Path, more: &[&str]) -> (u64, u64) {
    let mut formats = Formats::default();
    if more.contains(&"--experts") {
        formats.set(Class::Experts, Format::Int8Row);
    }
    let is_on = !more.contains(&"off");
    let base_url = format!("http://{}", server.address);
    let request = Request {
        from: to.join(DIR_NAME),
        repo: Some(Repo::new(&base_url, NAME, None).unwrap()),
        to: to.to_path_buf(),
        formats,
        scales: Scales::AbsMax,
        calibration: None,
        mtp: is_on,
        indexer: is_on,
        keep_free_bytes: 0,
        delete_source: true,
        threads: 1,
    };
    Plan::new(&request).unwrap().fetches(&request)
}

/// The last case has a scale in another shard than its weight, and numbers behind its headers that
/// plans need.
#[test]
fn a_fetched_checkpoint_becomes_what_a_local_one_becomes_and_each_byte_comes_once() {
    if curl().is_none() {
        return;
    }
    for (i, (name, more)) in [
        (SOURCE, &[][..]),
        (SOURCE, &["--mtp", "off", "--indexer", "off"]),
        ("formats/hf-fp8", &["--experts", "int8"]),
        ("formats/hf-nvfp4", &["--experts", "int8"]),
    ]
    .into_iter()
    .enumerate()
    {
        let to = TempDir::new(&format!("repo-same-{i}"));
        let watched = Some(to.0.join(DIR_NAME));
        let server = Server::new(&fixture(name), Quirks { watched, ..Quirks::default() });
        let plan = succeeded(server.convert(&to.0, &[more, &["--dry-run"]].concat()));
        assert!(plan.ends_with(" of it here at a time\n"), "{plan}");
        let (all_bytes, at_once) = announced(&server, &to.0, more);
        succeeded(server.convert(&to.0, more));
        assert!(contents(&to.0) == local(&format!("repo-same-{i}"), name, more), "{name}");
        assert_eq!(server.payload_sent(), lengths(name), "{name}");
        assert_eq!(all_bytes, lengths(name).values().sum::<usize>() as u64, "{name}");
        let both = name.contains("nvfp4");
        assert_eq!(at_once == all_bytes, both, "{name}: whether all of it is there at once");
        let most = server.log().iter().filter(|s| s.is_payload()).map(|s| s.held).max();
        assert_eq!(most, Some(at_once), "{name}: source bytes that were there at once");
        // What is finished needs nothing more, and what is lost only its own shard.
        let requests = server.log().len();
        succeeded(server.convert(&to.0, more));
        assert_eq!((server.log().len(), to.0.join(DIR_NAME).exists()), (requests, false), "{name}");
        let lost = to.0.join("out-00001.safetensors");
        let bytes = fs::read(&lost).unwrap();
        fs::remove_file(&lost).unwrap();
        succeeded(server.convert(&to.0, more));
        assert!(fs::read(&lost).unwrap() == bytes, "{name}");
        let all = server.log().split_off(requests).into_iter().filter(Seen::is_payload);
        let files: Vec<String> = all.map(|seen| seen.file).collect();
        assert!(files.len() == 1 && files[0].contains("-00002-"), "{name}: {files:?}");
    }
}

#[test]
fn a_dry_run_fetches_no_weights() {
    if curl().is_none() {
        return;
    }
    let to = TempDir::new("repo-dry");
    let server = Server::new(&fixture(SOURCE), Quirks::default());
    let plan = succeeded(server.convert(&to.0, &["--dry-run"]));
    assert!(plan.contains("  experts      int4-g64"), "{plan}");
    assert!(server.payload_sent().is_empty());
    let dir = to.0.join(DIR_NAME);
    assert!(held(&dir).is_empty());
    for (name, bytes) in lengths(SOURCE) {
        let laid_out = fs::read(dir.join(&name)).unwrap();
        let source = fs::read(fixture(SOURCE).join(&name)).unwrap();
        let start = 8 + u64::from_le_bytes(source[..8].try_into().unwrap()) as usize;
        assert_eq!(laid_out.len(), bytes, "{name}");
        assert!(laid_out[..start] == source[..start], "{name}");
        assert!(laid_out[start..].iter().all(|byte| *byte == 0), "{name}");
    }
    let requests = server.log().len();
    succeeded(server.convert(&to.0, &["--dry-run"]));
    let again = &server.log()[requests..];
    assert!(again.iter().all(|seen| !seen.file.ends_with(".safetensors")), "{again:?}");
}

#[test]
fn connections_that_break_are_gone_on_with_where_they_broke() {
    if curl().is_none() {
        return;
    }
    let to = TempDir::new("repo-broken");
    let quirks = Quirks { cut: Some(140_000), ..Quirks::default() };
    let server = Server::new(&fixture(SOURCE), quirks);
    succeeded(server.convert(&to.0, &[]));
    assert!(contents(&to.0) == local("repo-broken", SOURCE, &[]));
    assert_eq!(server.payload_sent(), lengths(SOURCE));
    let log = server.log().into_iter().filter(Seen::is_payload);
    let ranges: Vec<_> =
        log.filter(|seen| seen.file.contains("-00001-")).map(|s| s.range).collect();
    assert_eq!(ranges, [None, Some((140_000, None))]);
}

/// Once by a signal that cannot be caught, once as a terminal does it: to the whole group.
#[test]
fn a_download_that_is_killed_goes_on_where_it_was() {
    if curl().is_none() {
        return;
    }
    for signal in ["KILL", "INT"] {
        let to = TempDir::new(&format!("repo-killed-{signal}"));
        let quirks = Quirks { hang: Some(100_000), ..Quirks::default() };
        let server = Server::new(&fixture(SOURCE), quirks);
        let mut command = server.command(&to.0, &[]);
        let child = std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn();
        let child = child.unwrap();
        let partial = to.0.join(DIR_NAME).join("model-00001-of-00006.safetensors.partial");
        let start = Instant::now();
        while partial.metadata().map_or(0, |file| file.len()) < 100_000 {
            assert!(start.elapsed() < PATIENCE);
            thread::sleep(Duration::from_millis(1));
        }
        let group =
            if signal == "INT" { format!("-{}", child.id()) } else { child.id().to_string() };
        let kill = Command::new("kill").args([&format!("-{signal}"), "--", &group]).status();
        assert!(kill.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let code = if signal == "INT" { Some(130) } else { None };
        assert_eq!(output.status.code(), code, "{}", String::from_utf8_lossy(&output.stderr));
        server.set(Quirks::default());
        succeeded(server.convert(&to.0, &[]));
        assert!(contents(&to.0) == local(&format!("repo-killed-{signal}"), SOURCE, &[]));
        assert_eq!(server.payload_sent(), lengths(SOURCE), "{signal}");
    }
}

#[test]
fn what_the_server_does_wrong_is_said_with_the_file_and_the_status() {
    if curl().is_none() {
        return;
    }
    let quirks = Quirks::default;
    let shard = "model-00003-of-00006.safetensors";
    let cases = [
        (Quirks { status: Some((404, "config.json")), ..quirks() }, "config.json: HTTP status 404"),
        (
            Quirks { status: Some((404, "-00003-")), ..quirks() },
            "00003-of-00006.safetensors: HTTP status 404",
        ),
        (
            Quirks { status: Some((503, "-00003-")), ..quirks() },
            "00003-of-00006.safetensors: HTTP status 503",
        ),
        (
            Quirks { status: Some((403, "-00003-")), ..quirks() },
            "status 403: HF_TOKEN must open it",
        ),
        (
            Quirks { private: true, ..quirks() },
            "config.json: HTTP status 401: HF_TOKEN must open it",
        ),
        (Quirks { no_ranges: true, ..quirks() }, "HTTP status 200: the server gives no ranges"),
        (
            Quirks { longer: Some((9, "-00003-")), ..quirks() },
            "the last tensor, belong to no tensor",
        ),
    ];
    for (i, (quirks, why)) in cases.into_iter().enumerate() {
        let to = TempDir::new(&format!("repo-wrong-{i}"));
        let server = Server::new(&fixture(SOURCE), quirks);
        let message = refusal(server.convert(&to.0, &[]));
        assert!(
            message.contains(why) && message.contains(".json") | message.contains(".safetensors"),
            "{message}"
        );
        assert!(server.payload_sent().is_empty(), "{why}");
    }
    // After the plan.
    let to = TempDir::new("repo-wrong-later");
    let server = Server::new(&fixture(SOURCE), quirks());
    succeeded(server.convert(&to.0, &["--dry-run"]));
    for (wrong, why) in [
        (
            Quirks { longer: Some((9, shard)), ..quirks() },
            "expected 139520 bytes, the server has 139529: it was changed",
        ),
        (Quirks { status: Some((404, shard)), ..quirks() }, "HTTP status 404: check --repo"),
    ] {
        server.set(wrong);
        let message = refusal(server.convert(&to.0, &[]));
        assert!(message.contains(shard) && message.contains(why), "{message}");
    }
    server.set(quirks());
    succeeded(server.convert(&to.0, &[]));
    assert!(contents(&to.0) == local("repo-wrong-later", SOURCE, &[]));
}

#[test]
fn a_shard_that_changed_after_the_plan_is_refused_even_at_the_same_length() {
    if curl().is_none() {
        return;
    }
    let from = TempDir::with_fixture("repo-changed-source", SOURCE);
    let to = TempDir::new("repo-changed");
    let server = Server::new(&from.0, Quirks::default());
    succeeded(server.convert(&to.0, &["--dry-run"]));
    let path = from.0.join("model-00002-of-00006.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(5).position(|word| word == b"BF16\"").unwrap();
    bytes[at..at + 5].copy_from_slice(b"F16\" ");
    fs::write(&path, bytes).unwrap();
    let message = refusal(server.convert(&to.0, &[]));
    assert!(
        message.contains("model-00002-of-00006.safetensors.partial: other tensors"),
        "{message}"
    );
    assert!(!to.0.join("out-00001.safetensors").exists());
}

/// A script in the place of `curl` writes down what everybody could see of it.
#[test]
fn the_token_goes_to_the_server_and_nowhere_else() {
    let Some(curl) = curl() else { return };
    let dir = TempDir::new("repo-token");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {0}/seen\nenv >> {0}/seen\nexec {1} \"$@\"\n",
        dir.0.display(),
        curl.display()
    );
    fs::write(dir.0.join("curl"), script).unwrap();
    fs::set_permissions(dir.0.join("curl"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", dir.0.display(), std::env::var("PATH").unwrap());
    for (i, (token, elsewhere)) in
        [(TOKEN, false), (TOKEN, true), ("hf_wrongSecret", false), ("hf_wrong\"Secret\nurl", false)]
            .into_iter()
            .enumerate()
    {
        let to = dir.0.join(format!("to-{i}"));
        let quirks = Quirks { private: true, elsewhere, ..Quirks::default() };
        let server = Server::new(&fixture(SOURCE), quirks);
        let mut command = server.command(&to, &[]);
        let output = command.env("PATH", &path).env("HF_TOKEN", token).output().unwrap();
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8(text).unwrap();
        let seen = fs::read_to_string(dir.0.join("seen")).unwrap();
        assert!(!text.contains("Secret"), "{text}");
        assert!(seen.contains("--config -") && !seen.contains("Secret"), "{seen}");
        if token == TOKEN {
            assert_eq!(output.status.code(), Some(0), "{text}");
            let record = fs::read_to_string(to.join(FILE_NAME)).unwrap();
            assert!(!record.contains("Secret"), "{record}");
            let given = |seen: &Seen| seen.authorization == Some(format!("Bearer {TOKEN}"));
            assert!(server.log().iter().all(|seen| given(seen) != elsewhere), "sent elsewhere");
        } else {
            let why = if i == 2 { "HTTP status 401" } else { "the token has characters" };
            assert!(output.status.code() != Some(0) && text.contains(why), "{text}");
        }
    }
}

#[test]
fn without_curl_two_commands_are_named_that_do_the_same_by_hand() {
    let dir = TempDir::new("repo-no-curl");
    let server = Server::new(&fixture(SOURCE), Quirks::default());
    let output = server.command(&dir.0, &[]).env("PATH", &dir.0).output().unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{notes}");
    let commands: Vec<&str> = notes.lines().filter(|line| line.starts_with("  ")).collect();
    let clone = format!("  git clone http://{}/{NAME} DIR", server.address);
    assert_eq!(commands, [&clone, "  coli convert --from DIR --to TO --delete-source"]);
}

#[test]
fn wrong_names_and_flags_that_contradict_are_wrong_usage() {
    for (words, why) in [
        ("--repo a/b --from c", "--from and --repo exclude each other"),
        ("--base-url http://localhost", "--base-url needs --repo"),
        ("--repo ../a", "as OWNER/NAME, found \"../a\""),
        ("--repo a/b/c", "as OWNER/NAME, found \"a/b/c\""),
        ("--repo a/b?c", "as OWNER/NAME, found \"a/b?c\""),
        ("--repo a/b --base-url file:///etc", "address, found \"file:///etc\""),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
        command.args(["convert", "--to", "nowhere"]).args(words.split(' '));
        let output = command.env_remove("HF_TOKEN").env_remove("HF_ENDPOINT").output().unwrap();
        let notes = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words}: {notes}");
        assert!(notes.contains(why), "{words}: {notes}");
    }
}

#[test]
fn room_that_shall_stay_free_is_not_filled_with_a_source() {
    if curl().is_none() {
        return;
    }
    let to = TempDir::new("repo-floor");
    let server = Server::new(&fixture(SOURCE), Quirks::default());
    let mut command = Command::new(env!("CARGO_BIN_EXE_coli"));
    command.args(["convert", "--repo", NAME, "--keep-free", "1000000"]).arg("--to").arg(&to.0);
    let output = command.env("HF_ENDPOINT", format!("http://{}", server.address)).output().unwrap();
    let message = refusal(output);
    assert!(message.contains("model-00001-of-00006.safetensors takes 0.1 MB and"), "{message}");
    assert!(server.payload_sent().is_empty());
}

/// More than is asked for at first.
#[test]
fn a_long_header_is_fetched_to_its_end() {
    if curl().is_none() {
        return;
    }
    let from = TempDir::with_fixture("repo-long-source", SOURCE);
    let path = from.0.join("model-00001-of-00006.safetensors");
    let source = fs::read(&path).unwrap();
    let (word, rest) = source.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*word) as usize);
    let padded = [header, &[b' '; 300_000]].concat();
    fs::write(&path, [&(padded.len() as u64).to_le_bytes(), &padded[..], data].concat()).unwrap();
    let to = TempDir::new("repo-long");
    let server = Server::new(&from.0, Quirks::default());
    succeeded(server.convert(&to.0, &[]));
    assert!(contents(&to.0) == local("repo-long", SOURCE, &[]));
    let ranges = server.log().into_iter().filter(|seen| seen.file.contains("-00001-"));
    let ends: Vec<_> = ranges.filter_map(|seen| seen.range).collect();
    let head_bytes = 8 + padded.len();
    assert_eq!(ends, [(0, Some((256 << 10) - 1)), (256 << 10, Some(head_bytes - 1))]);
}
