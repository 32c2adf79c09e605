//! The HTTP layer under clients that are broken, slow or gone: it goes on serving, and keeps
//! nothing of them.
//!
//! Every run draws a new seed and prints it; `COLI_FUZZ_SEED=<number>` repeats the requests. (The
//! system still decides in which pieces they arrive.)

#![forbid(unsafe_code)]
#![cfg(target_os = "linux")]

mod common;

use colibri::http::{Limits, Outcome, Request, Responder, Server};
use colibri::json;
use common::{Random, new_seed};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for anything that must come; a test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// Clients at a time.
const CLIENTS: usize = 4;

/// The threads of a server are found by name, so that there must be one server at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The `status` files of all threads called `name`.
fn threads(name: &str) -> Vec<String> {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let named = tasks.filter(|task| read(task.join("comm")).trim_end() == name);
    named.map(|task| read(task.join("status"))).collect()
}

/// `/long` is a stream of 100 KB; everything else is answered with its body.
fn answer(request: &Request, responder: &mut Responder) -> Outcome {
    if request.path != "/long" {
        return responder.respond(200, "text/plain", &request.body);
    }
    responder.start_events()?;
    for _ in 0..100 {
        responder.event(&"a".repeat(1000))?;
    }
    responder.finish()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn assert_serves(address: SocketAddr) {
    let mut stream = connect(address);
    let request = "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nok"), "{text}");
}

/// Runs `storm` against a server; fails unless that still serves, has no thread of a connection
/// left, and ends without cutting off anything.
fn weather(limits: Limits, storm: impl FnOnce(SocketAddr)) {
    let _alone = alone();
    // As the program does: a write to a client that is gone must not end the process.
    colibri::sys::end_quietly_on_closed_pipe();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), limits).unwrap();
    let (address, stopper) = (server.address(), server.stopper());
    let listener = thread::Builder::new().name("listener".into());
    let listener = listener.spawn(move || server.run(answer)).unwrap();
    storm(address);
    assert_serves(address);
    let deadline = Instant::now() + PATIENCE;
    while !threads("http").is_empty() {
        assert!(Instant::now() < deadline, "{} threads are left", threads("http").len());
        thread::sleep(Duration::from_millis(5));
    }
    stopper.stop();
    assert_eq!(listener.join().unwrap(), 0, "connections that were cut off");
}

/// Draws `count` cases in each of a few threads.
fn storm(name: &str, count: usize, case: impl Fn(&mut Random) + Sync) {
    let seed = new_seed();
    println!("{name}: COLI_FUZZ_SEED={seed}");
    thread::scope(|scope| {
        for client in 1..=CLIENTS {
            let case = &case;
            scope.spawn(move || {
                let mut random = Random::new(seed.wrapping_mul(client as u64));
                (0..count / CLIENTS).for_each(|_| case(&mut random));
            });
        }
    });
}

const REQUESTS: [&str; 6] = [
    "GET /v1/models?a=b HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "POST /v1/chat%20x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{\"stream\":1}\n",
    "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n\
     3;x=y\r\nfgh\r\n0\r\nX: y\r\n\r\n",
    "HEAD /a HTTP/1.0\r\nConnection: keep-alive\r\nAuthorization: Bearer a\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    "OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\nOrigin: http://a\r\nConnection: close\r\n\r\n",
];

/// What requests stumble over.
const TOKENS: [&str; 30] = [
    "\r\n",
    "\n",
    "\r",
    "\0",
    " ",
    "\t",
    ":",
    "%",
    "%00",
    "%ff",
    "//",
    "?",
    "é",
    "\u{feff}",
    "-1",
    "18446744073709551616",
    "ffffffffffffffff",
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/9.9",
    "GET ",
    "Content-Length: 5\r\n",
    "Content-Length: 1000000000000\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: gzip\r\n",
    "Host: b\r\n",
    "Expect: x\r\n",
    "0\r\n\r\n",
    "\r\n\r\n",
    "http://",
];

/// A good request, or two, with some changes.
fn mutated(random: &mut Random) -> Vec<u8> {
    let mut bytes = random.pick(&REQUESTS).as_bytes().to_vec();
    if random.below(4) == 0 {
        bytes.extend_from_slice(random.pick(&REQUESTS).as_bytes());
    }
    for _ in 0..1 + random.below(4) {
        let (at, end) = (random.below(bytes.len() + 1), random.below(bytes.len() + 1));
        let (start, end) = (at.min(end), at.max(end));
        match random.below(6) {
            0 if !bytes.is_empty() => {
                let at = random.below(bytes.len());
                bytes[at] = random.next() as u8;
            }
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(start..end.min(start + 8))),
            3 => {
                let copy = bytes[start..end].to_vec();
                bytes.splice(at..at, copy.repeat(1 + random.below(3)));
            }
            4 => drop(bytes.splice(at..at, "a".repeat(random.below(3000)).into_bytes())),
            _ => drop(bytes.splice(at..at, random.pick(&TOKENS).bytes())),
        }
    }
    bytes
}

/// Checks every answer: its status is one for a client's fault, and what refuses says why.
fn check_answers(request: &[u8], answers: &[u8]) {
    let show = || {
        format!(
            "{:?} -> {:?}",
            request.escape_ascii().to_string(),
            answers.escape_ascii().to_string()
        )
    };
    let Some(rest) = answers.strip_prefix(b"HTTP/1.1 ") else {
        return assert!(answers.is_empty(), "{}", show());
    };
    let status = std::str::from_utf8(&rest[..3]).unwrap();
    let known = ["100", "200", "400", "411", "413", "414", "417", "431", "501", "505"];
    assert!(known.contains(&status), "{}", show());
    if !["100", "200"].contains(&status) {
        let body = answers.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let object = json::parse(&answers[body..], json::Limits::default());
        assert!(object.is_ok_and(|object| object.get("error").is_some()), "{}", show());
    }
}

#[test]
fn broken_requests_are_refused_and_leave_nothing_behind() {
    weather(Limits { body_bytes: 1 << 20, ..Limits::default() }, |address| {
        storm("broken requests", 10_000, |random| {
            let request = mutated(random);
            let mut stream = connect(address);
            // The answer may come, and the connection end, before all is sent.
            let _ = stream.write_all(&request);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answers = Vec::new();
            stream.read_to_end(&mut answers).unwrap();
            check_answers(&request, &answers);
        });
    });
}

#[test]
fn clients_that_disappear_at_any_moment_leave_nothing_behind() {
    weather(Limits::default(), |address| {
        storm("disconnects", 1000, |random| {
            let long = "GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n";
            let mid_response = random.below(2) == 0;
            let request = if mid_response { long } else { random.pick(&REQUESTS) };
            let mut stream = connect(address);
            if mid_response {
                stream.write_all(request.as_bytes()).unwrap();
                let mut part = vec![0; 1 + random.below(50_000)];
                stream.read_exact(&mut part).unwrap();
            } else {
                stream.write_all(&request.as_bytes()[..random.below(request.len())]).unwrap();
            }
        });
    });
}

#[test]
fn slow_clients_are_ended_by_a_deadline_that_their_bytes_do_not_move() {
    let time = Duration::from_millis(1000);
    let limits = Limits { head_time: time, body_time: time, ..Limits::default() };
    weather(limits, |address| {
        let heads = [
            "GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
            "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        ];
        let mut clients: Vec<TcpStream> = (0..200).map(|_| connect(address)).collect();
        for (client, head) in clients.iter_mut().zip(heads.iter().cycle()) {
            client.write_all(head.as_bytes()).unwrap();
        }
        let deadline = Instant::now() + PATIENCE;
        while !clients.is_empty() {
            assert!(Instant::now() < deadline, "{} slow clients are left", clients.len());
            assert_serves(address);
            clients.retain_mut(|client| {
                client.set_nonblocking(true).unwrap();
                let mut answer = [0; 12];
                match client.read(&mut answer) {
                    Ok(count) => {
                        assert_eq!(&answer[..count], b"HTTP/1.1 408");
                        false
                    }
                    Err(_) => client.write_all(b"a").is_ok(),
                }
            });
            thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn a_server_without_requests_sleeps() {
    weather(Limits::default(), |address| {
        let mut idle = connect(address);
        idle.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert!(idle.read(&mut [0; 1000]).unwrap() > 0);
        // Until both threads have come to rest.
        thread::sleep(Duration::from_millis(100));
        let switches = || {
            let all = [threads("listener"), threads("http")].concat();
            assert_eq!(all.len(), 2);
            let lines = all.iter().flat_map(|status| status.lines());
            let line = lines.filter(|line| line.contains("ctxt_switches:"));
            line.map(|l| l.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum::<u64>()
        };
        let before = switches();
        thread::sleep(Duration::from_millis(400));
        assert!(switches() <= before + 1, "woken {} times", switches() - before);
    });
}
