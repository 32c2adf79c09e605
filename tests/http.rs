//! The HTTP layer over raw sockets: what each kind of client sends, and what it must get.

#![forbid(unsafe_code)]

use colibri::http::{
    Failure, Handler, Limits, Outcome, Refusal, Request, Responder, Server, Stopper, check_bind,
    check_host, check_key, cors_headers,
};
use colibri::json::{self, Value};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for anything that must come; a test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server on a free port that ends with the test.
struct Running {
    address: SocketAddr,
    stopper: Stopper,
    thread: Option<JoinHandle<usize>>,
}

impl Running {
    fn new(limits: Limits, handler: impl Handler) -> Running {
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), limits).unwrap();
        let (address, stopper) = (server.address(), server.stopper());
        let builder = std::thread::Builder::new().name("listener".into());
        let thread = Some(builder.spawn(move || server.run(handler)).unwrap());
        Running { address, stopper, thread }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends `bytes` and reads until the server closes.
    fn talk(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // A refusal may come, and close the connection, before all is sent.
        let _ = stream.write_all(bytes);
        read_to_end(&mut stream)
    }

    /// Stops the server; how many requests it had to cut off.
    fn stop(mut self) -> usize {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_to_end(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Reads until what came ends with `end`.
fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(end.as_bytes()) {
        let mut byte = [0];
        let count = stream.read(&mut byte).unwrap();
        assert_eq!(count, 1, "no {end:?} in {:?}", String::from_utf8_lossy(&bytes));
        bytes.push(byte[0]);
    }
    String::from_utf8(bytes).unwrap()
}

/// Short limits, each of which a test can reach.
fn limits() -> Limits {
    Limits {
        request_line_bytes: 200,
        head_bytes: 1000,
        headers: 10,
        body_bytes: 1 << 20,
        ..Limits::default()
    }
}

/// Answers with what it was asked.
fn echo(request: &Request, responder: &mut Responder) -> Outcome {
    let body = String::from_utf8_lossy(&request.body);
    let text = format!("{} {:?} {}", request.method, request.segments, request.query);
    responder.respond(200, "text/plain", format!("{text}|{body}").as_bytes())
}

/// The status of an answer, 0 for none.
fn status(answer: &str) -> u16 {
    answer.get(9..12).and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

/// Fails unless the answer's body is an error object; returns its code.
fn error_code(answer: &str) -> Option<String> {
    let object = json::parse(body(answer).as_bytes(), json::Limits::default());
    let object = object.unwrap_or_else(|e| panic!("{e}: {answer}"));
    let [(name, error)] = object.as_object().unwrap() else { panic!("{answer}") };
    let members = error.as_object().unwrap();
    let keys: Vec<&str> = members.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!((name.as_str(), keys), ("error", vec!["message", "type", "param", "code"]));
    assert!(!error.get("message").unwrap().as_str().unwrap().is_empty());
    assert!(!error.get("type").unwrap().as_str().unwrap().is_empty());
    error.get("code").and_then(Value::as_str).map(String::from)
}

const CLOSE: &str = "Host: localhost\r\nConnection: close\r\n";

/// What is wrong with a request, the request, and its status and code.
type BadRow = (&'static str, String, u16, Option<&'static str>);

fn bad_heads() -> Vec<BadRow> {
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\n{CLOSE}\r\n");
    let with = |lines: &str| format!("GET / HTTP/1.1\r\n{CLOSE}{lines}\r\n");
    let long = "a".repeat(200);
    let (too_long, too_many) = (Some("uri_too_long"), Some("headers_too_large"));
    let version = Some("http_version_not_supported");
    vec![
        ("no words", "\0\x01\x02\r\n\r\n".into(), 400, None),
        ("two words", format!("GET /\r\n{CLOSE}\r\n"), 400, None),
        ("two spaces", format!("GET  / HTTP/1.1\r\n{CLOSE}\r\n"), 400, None),
        ("two empty lines first", format!("\r\n\r\nGET / HTTP/1.1\r\n{CLOSE}\r\n"), 400, None),
        ("lines end with LF", "GET / HTTP/1.1\nHost: localhost\n\n".into(), 400, None),
        ("small letters in the version", format!("GET / http/1.1\r\n{CLOSE}\r\n"), 400, None),
        ("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), 505, version),
        ("HTTP/1.2", format!("GET / HTTP/1.2\r\n{CLOSE}\r\n"), 505, version),
        ("unknown method", format!("BREW / HTTP/1.1\r\n{CLOSE}\r\n"), 501, Some("not_implemented")),
        ("method in small letters", format!("get / HTTP/1.1\r\n{CLOSE}\r\n"), 501, None),
        ("relative target", get("v1/models"), 400, None),
        ("star of another method", get("*"), 400, None),
        ("another scheme", get("ftp://localhost/"), 400, None),
        ("raw UTF-8 in the target", get("/é"), 400, None),
        ("escape that is cut off", get("/a%2"), 400, None),
        ("escape that is no number", get("/%+1"), 400, None),
        ("escape that is not UTF-8", get("/%ff"), 400, None),
        ("long target", get(&format!("/{long}")), 414, too_long),
        ("endless target", "GET /".to_string() + &long, 414, too_long),
        ("no Host", "GET / HTTP/1.1\r\n\r\n".into(), 400, None),
        ("two Hosts", with("Host: other\r\n"), 400, None),
        ("folded header", with("A: b\r\n c\r\n"), 400, None),
        ("space before the colon", with("A : b\r\n"), 400, None),
        ("no colon", with("A b\r\n"), 400, None),
        ("no name", with(": b\r\n"), 400, None),
        ("CR in a value", with("A: b\rc\r\n"), 400, None),
        ("NUL in a value", with("A: b\0c\r\n"), 400, None),
        ("many headers", with(&"A: b\r\n".repeat(9)), 431, too_many),
        ("long header", with(&format!("A: {}\r\n", "b".repeat(1000))), 431, too_many),
        ("endless header", with(&format!("A: {}", "b".repeat(2000))), 431, too_many),
        ("an expectation", with("Expect: 200-ok\r\n"), 417, Some("expectation_failed")),
    ]
}

fn bad_framings() -> Vec<BadRow> {
    let post = |lines: &str| format!("POST / HTTP/1.1\r\n{CLOSE}{lines}");
    let chunks = |body: &str| post(&format!("Transfer-Encoding: chunked\r\n\r\n{body}"));
    let (large, length) = (Some("request_too_large"), "Content-Length");
    let coded = Some("not_implemented");
    vec![
        ("no framing", post("\r\n{}"), 411, Some("length_required")),
        ("two lengths", post("Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}"), 400, None),
        ("list of lengths", post("Content-Length: 2, 2\r\n\r\n{}"), 400, None),
        ("signed length", post(&format!("{length}: +2\r\n\r\n{{}}")), 400, None),
        ("negative length", post(&format!("{length}: -2\r\n\r\n{{}}")), 400, None),
        ("no length at all", post(&format!("{length}:\r\n\r\n{{}}")), 400, None),
        ("large length", post(&format!("{length}: 1048577\r\n\r\n")), 413, large),
        ("3 GB", post(&format!("{length}: 3221225472\r\n\r\n")), 413, large),
        ("length beyond 64 bits", post(&format!("{length}: {}\r\n\r\n", u128::MAX)), 413, large),
        (
            "both framings",
            post("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            400,
            None,
        ),
        ("gzip", post("Transfer-Encoding: gzip\r\n\r\n"), 501, coded),
        ("gzip, chunked", post("Transfer-Encoding: gzip, chunked\r\n\r\n"), 501, coded),
        (
            "chunked twice",
            post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            501,
            coded,
        ),
        ("no coding", post("Transfer-Encoding: \r\n\r\n0\r\n\r\n"), 501, coded),
        (
            "chunks in HTTP/1.0",
            "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".into(),
            400,
            None,
        ),
        ("chunk without a size", chunks("\r\n\r\n"), 400, None),
        ("chunk with a sign", chunks("+2\r\n{}\r\n0\r\n\r\n"), 400, None),
        ("chunk with 0x", chunks("0x2\r\n{}\r\n0\r\n\r\n"), 400, None),
        ("chunk longer than its size", chunks("2\r\n{}}\r\n0\r\n\r\n"), 400, None),
        ("long extension", chunks(&format!("2;{}\r\n", "a".repeat(300))), 400, None),
        ("large chunk", chunks("100001\r\n"), 413, large),
        ("chunk beyond 64 bits", chunks("10000000000000000\r\n"), 413, large),
        ("second chunk too large", chunks("2\r\n{}\r\nfffff\r\n"), 413, large),
        ("broken trailer", chunks("0\r\nA b\r\n\r\n"), 400, None),
        ("long trailer", chunks(&format!("0\r\nA: {}", "b".repeat(1001))), 431, None),
        ("many trailers", chunks(&("0\r\n".to_string() + &"A: b\r\n".repeat(11))), 431, None),
    ]
}

#[test]
fn what_two_programs_could_read_differently_is_refused_with_an_error_object() {
    let server = Running::new(limits(), echo);
    for (name, request, want, code) in bad_heads().into_iter().chain(bad_framings()) {
        let answer = server.talk(request.as_bytes());
        assert_eq!(status(&answer), want, "{name}: {answer}");
        let found = error_code(&answer);
        assert!(code.is_none() || found.as_deref() == code, "{name}: {answer}");
        assert!(answer.contains("\r\nContent-Type: application/json\r\n"), "{name}: {answer}");
        assert!(answer.contains("\r\nConnection: close\r\n"), "{name}: {answer}");
    }
}

/// What is right with a request, the request, and the body of its answer.
fn good_requests() -> Vec<(&'static str, String, &'static str)> {
    let get = |target: &str| format!("GET {target} HTTP/1.1\r\n{CLOSE}\r\n");
    let with = |lines: &str| format!("GET /a HTTP/1.1\r\n{CLOSE}{lines}\r\n");
    let post = |lines: &str| format!("POST /a HTTP/1.1\r\n{CLOSE}{lines}");
    let chunks = |body: &str| post(&format!("Transfer-Encoding: Chunked\r\n\r\n{body}"));
    vec![
        ("slashes", get("//v1//models/?a=%20b&c"), r#"GET ["v1", "models"] a=%20b&c|"#),
        ("escapes", get("/m/zai%2Forg%c3%a9"), r#"GET ["m", "zai/orgé"] |"#),
        ("absolute target", get("http://localhost:80/a?b"), r#"GET ["a"] b|"#),
        ("absolute target without a path", get("http://localhost?b"), r#"GET [] b|"#),
        ("OPTIONS *", format!("OPTIONS * HTTP/1.1\r\n{CLOSE}\r\n"), r#"OPTIONS ["*"] |"#),
        ("empty line first", format!("\r\n{}", get("/a")), r#"GET ["a"] |"#),
        ("any encoding", with("Accept-Encoding: gzip, zstd\r\n"), r#"GET ["a"] |"#),
        ("tab and UTF-8 in a value", with("X:\té\tb\r\n"), r#"GET ["a"] |"#),
        ("length", post("content-LENGTH:  2 \r\n\r\n{}"), r#"POST ["a"] |{}"#),
        ("length 0", post("Content-Length: 0\r\n\r\n"), r#"POST ["a"] |"#),
        ("chunks", chunks("1\r\n{\r\n01\r\n}\r\n0\r\n\r\n"), r#"POST ["a"] |{}"#),
        ("trailers", chunks("2 ;a=\"b\"\r\n{}\r\n0\r\nA: b\r\n\r\n"), r#"POST ["a"] |{}"#),
        ("HTTP/1.0", "GET /a HTTP/1.0\r\n\r\n".into(), r#"GET ["a"] |"#),
        (
            "HTTP/1.0 with a body",
            "POST /a HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}".into(),
            r#"POST ["a"] |{}"#,
        ),
    ]
}

#[test]
fn what_clients_send_is_understood() {
    let server = Running::new(limits(), echo);
    for (name, request, want) in good_requests() {
        let answer = server.talk(request.as_bytes());
        assert_eq!((status(&answer), body(&answer)), (200, want), "{name}: {answer}");
        assert!(answer.contains(&format!("\r\nContent-Length: {}\r\n", want.len())), "{name}");
    }
}

#[test]
fn a_connection_is_kept_as_the_client_asks() {
    let server = Running::new(Limits { requests_per_connection: 3, ..limits() }, echo);
    // What the client says, and whether it gets a second answer.
    for (version, connection, kept) in [
        ("HTTP/1.1", "", true),
        ("HTTP/1.1", "Connection: keep-alive\r\n", true),
        ("HTTP/1.1", "Connection: keep-alive, Close\r\n", false),
        ("HTTP/1.0", "", false),
        ("HTTP/1.0", "Connection: Keep-Alive\r\n", true),
    ] {
        let request = format!("GET / {version}\r\nHost: localhost\r\n{connection}\r\n");
        let mut stream = server.connect();
        let answers = if kept { 3 } else { 1 };
        for answer in 1..=answers {
            stream.write_all(request.as_bytes()).unwrap();
            let head = read_until(&mut stream, "\r\n\r\n");
            read_until(&mut stream, "|");
            assert_eq!(status(&head), 200, "{request}");
            let says = |text: &str| head.contains(&format!("\r\nConnection: {text}\r\n"));
            // The third is the last by the limit.
            assert_eq!(says("close"), answer == answers, "{request}{head}");
            let is_1_0 = version == "HTTP/1.0";
            assert_eq!(says("keep-alive"), is_1_0 && answer < answers, "{request}{head}");
        }
        assert_eq!(read_to_end(&mut stream), "", "{request}");
    }
}

#[test]
fn requests_that_arrive_together_are_answered_in_order() {
    let server = Running::new(limits(), |request: &Request, responder: &mut Responder| {
        // Looking for the client must not lose what it sent already.
        assert!(!responder.is_gone());
        echo(request, responder)
    });
    let post = "POST /1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}";
    let chunked = "POST /2 HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n\
                   2\r\n{}\r\n0\r\n\r\n";
    let answers = server.talk(format!("{post}{chunked}GET /3 HTTP/1.1\r\n{CLOSE}\r\n").as_bytes());
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 3, "{answers}");
    let order: Vec<usize> =
        [r#"["1"] |{}"#, r#"["2"] |{}"#, r#"["3"] |"#].map(|b| answers.find(b).unwrap()).into();
    assert!(order.is_sorted(), "{answers}");
}

#[test]
fn a_request_that_arrives_byte_by_byte_is_read() {
    let server = Running::new(limits(), echo);
    let mut stream = server.connect();
    stream.set_nodelay(true).unwrap();
    let request = format!("POST /a HTTP/1.1\r\n{CLOSE}Transfer-Encoding: chunked\r\n\r\n");
    for byte in (request + "2\r\n{}\r\n0\r\nA: b\r\n\r\n").bytes() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(body(&read_to_end(&mut stream)), r#"POST ["a"] |{}"#);
}

#[test]
fn a_body_that_waits_for_continue_is_asked_for_only_if_it_is_wanted() {
    struct Choosy;
    impl Handler for Choosy {
        fn admit(&self, request: &Request, responder: &mut Responder) -> Outcome {
            responder.set_header("X-Seen", "yes");
            check_key(request.header("authorization"), "secret").map_err(Failure::from)
        }
        fn handle(&self, request: &Request, responder: &mut Responder) -> Outcome {
            echo(request, responder)
        }
    }
    let server = Running::new(limits(), Choosy);
    let head = |key: &str, length: usize| {
        format!(
            "POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\
             Authorization: Bearer {key}\r\nExpect: 100-Continue\r\n\r\n"
        )
    };
    let mut stream = server.connect();
    stream.write_all(head("secret", 2).as_bytes()).unwrap();
    assert_eq!(read_until(&mut stream, "\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"{}").unwrap();
    assert!(read_until(&mut stream, "|{}").contains("200 OK"));
    // Neither of these bodies is sent, and the connection ends with the answer.
    let refused = server.talk(head("wrong", 2).as_bytes());
    assert_eq!(
        (status(&refused), error_code(&refused).unwrap().as_str()),
        (401, "invalid_api_key")
    );
    assert!(refused.contains("\r\nX-Seen: yes\r\n"), "{refused}");
    assert!(refused.contains("\r\nWWW-Authenticate: Bearer\r\n"), "{refused}");
    assert_eq!(status(&server.talk(head("secret", 2 << 20).as_bytes())), 413);
}

#[test]
fn a_client_that_is_still_sending_gets_its_refusal() {
    let server = Running::new(limits(), echo);
    let head = format!("POST / HTTP/1.1\r\n{CLOSE}Content-Length: 2000000\r\n\r\n");
    let mut stream = server.connect();
    stream.write_all(&[head.as_bytes(), &[b'a'; 100_000]].concat()).unwrap();
    let answer = read_to_end(&mut stream);
    // Clients that send all before they read get there: the connection is not reset.
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(20));
        stream.write_all(&[b'a'; 100_000]).unwrap();
    }
    assert_eq!(
        (status(&answer), error_code(&answer).unwrap().as_str()),
        (413, "request_too_large")
    );
}

/// A stream of two events, a failed one, and other answers, by path.
fn answer_by_path(request: &Request, responder: &mut Responder) -> Outcome {
    match request.path.as_str() {
        "/events" => {
            responder.start_events()?;
            responder.event("{\"a\":1}")?;
            responder.keep_waiting()?;
            responder.event("[DONE]")?;
            responder.finish()
        }
        "/spaces" => {
            responder.start(200, "application/json")?;
            responder.write(b" ")?;
            responder.write(b"")?;
            responder.write(b"{}")?;
            responder.finish()
        }
        "/refused" => Err(Refusal::new(429, "full").header("Retry-After", "1").into()),
        "/method" => Err(Refusal::new(405, "only POST").header("Allow", "POST").into()),
        "/field" => Err(Refusal::new(400, "bad \"n\"").param("n").code("unsupported_value").into()),
        "/empty" => responder.respond(204, "", b""),
        "/silent" => Ok(()),
        "/panic" => panic!("a handler that fails on purpose"),
        _ => {
            responder.start_events()?;
            responder.event("1")?;
            match request.path.as_str() {
                "/late-panic" => panic!("a handler that fails half-way on purpose"),
                "/late-refusal" => Err(Refusal::new(500, "late").into()),
                _ => Ok(()),
            }
        }
    }
}

#[test]
fn each_answer_is_framed_so_that_its_end_is_known() {
    let server = Running::new(limits(), answer_by_path);
    let ask = |method: &str, path: &str, version: &str| {
        server.talk(format!("{method} {path} HTTP/{version}\r\n{CLOSE}\r\n").as_bytes())
    };
    let events = "data: {\"a\":1}\n\n: keepalive\n\ndata: [DONE]\n\n";
    let answer = ask("GET", "/events", "1.1");
    for header in [
        "Content-Type: text/event-stream",
        "Cache-Control: no-cache",
        "X-Accel-Buffering: no",
        "Transfer-Encoding: chunked",
    ] {
        assert!(answer.contains(&format!("\r\n{header}\r\n")), "{header}: {answer}");
    }
    let chunks = "f\r\ndata: {\"a\":1}\n\n\r\nd\r\n: keepalive\n\n\r\ne\r\ndata: [DONE]\n\n\r\n";
    assert_eq!(body(&answer), format!("{chunks}0\r\n\r\n"));
    let answer = ask("GET", "/events", "1.0");
    assert!(!answer.contains("chunked") && body(&answer) == events, "{answer}");
    assert_eq!(body(&ask("GET", "/spaces", "1.1")), "1\r\n \r\n2\r\n{}\r\n0\r\n\r\n");
    assert_eq!(body(&ask("HEAD", "/events", "1.1")), "");
    let (get, head) = (ask("GET", "/refused", "1.1"), ask("HEAD", "/refused", "1.1"));
    assert_eq!(head, get.strip_suffix(body(&get)).unwrap());
    assert!(get.contains("\r\nRetry-After: 1\r\n") && status(&get) == 429, "{get}");
    let answer = ask("GET", "/empty", "1.1");
    assert!(answer.starts_with("HTTP/1.1 204 No Content\r\n") && !answer.contains("Content-"));
    let answer = ask("DELETE", "/method", "1.1");
    assert!(answer.starts_with("HTTP/1.1 405 ") && answer.contains("\r\nAllow: POST\r\n"));
    let want = concat!(
        r#"{"error":{"message":"bad \"n\"","type":"invalid_request_error","#,
        r#""param":"n","code":"unsupported_value"}}"#
    );
    assert_eq!(body(&ask("GET", "/field", "1.1")), want);
}

#[test]
fn a_handler_that_fails_harms_nobody_and_no_broken_stream_looks_complete() {
    let server = Running::new(limits(), answer_by_path);
    let ask = |path: &str| server.talk(format!("GET {path} HTTP/1.1\r\n{CLOSE}\r\n").as_bytes());
    for path in ["/panic", "/silent"] {
        let answer = ask(path);
        assert_eq!(status(&answer), 500, "{path}: {answer}");
        assert_eq!(error_code(&answer).unwrap(), "internal_error", "{path}");
    }
    for path in ["/late-panic", "/late-refusal", "/unfinished"] {
        // The client would keep the connection.
        let answer = server.talk(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        assert_eq!(body(&answer), "9\r\ndata: 1\n\n\r\n", "{path}");
    }
    assert_eq!(status(&ask("/events")), 200);
    assert_eq!(server.stop(), 0);
}

#[test]
fn what_a_request_makes_of_a_header_stays_in_its_line() {
    let server = Running::new(limits(), |request: &Request, responder: &mut Responder| {
        responder.set_header("X-Echo", request.segments[0].as_str());
        responder.respond(200, "text/plain", b"")
    });
    let answer = server.talk(format!("GET /a%0d%0aX-B:%20c HTTP/1.1\r\n{CLOSE}\r\n").as_bytes());
    assert!(answer.contains("\r\nX-Echo: aX-B: c\r\n"), "{answer}");
}

/// Handlers of `/wait` answer nothing until the client hangs up; they tell both.
fn wait_until_gone() -> (impl Handler, mpsc::Receiver<&'static str>) {
    let (sender, steps) = mpsc::channel();
    let handler = move |request: &Request, responder: &mut Responder| {
        if request.path != "/wait" {
            return echo(request, responder);
        }
        sender.send("started").unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !responder.is_gone() {
            assert!(Instant::now() < deadline, "a client that never hangs up");
            std::thread::sleep(Duration::from_millis(2));
        }
        sender.send("gone").unwrap();
        Err(Failure::Gone)
    };
    (handler, steps)
}

const WAIT: &str = "GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n";

#[test]
fn a_client_that_hangs_up_is_noticed_while_nothing_is_written() {
    let (handler, steps) = wait_until_gone();
    let server = Running::new(limits(), handler);
    // Further requests behind the first must not hide it.
    for count in [1, 3] {
        let mut stream = server.connect();
        stream.write_all(WAIT.repeat(count).as_bytes()).unwrap();
        assert_eq!(steps.recv_timeout(PATIENCE), Ok("started"));
        std::thread::sleep(Duration::from_millis(20));
        assert!(steps.try_recv().is_err(), "the client is still there");
        drop(stream);
        assert_eq!(steps.recv_timeout(PATIENCE), Ok("gone"));
    }
}

#[test]
fn a_client_that_does_not_read_cannot_hold_a_thread() {
    let (sender, gone) = mpsc::channel();
    let limits = Limits { write_time: Duration::from_millis(100), ..limits() };
    let server = Running::new(limits, move |request: &Request, responder: &mut Responder| {
        if request.path == "/" {
            return echo(request, responder);
        }
        let outcome = match request.path.as_str() {
            "/whole" => responder.respond(200, "text/plain", &vec![0; 64 << 20]),
            _ => responder
                .start_events()
                .and_then(|()| (0..1000).try_for_each(|_| responder.event(&"a".repeat(64 << 10)))),
        };
        sender.send(outcome.clone()).unwrap();
        outcome
    });
    for path in ["/whole", "/events"] {
        let mut stream = server.connect();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(gone.recv_timeout(PATIENCE).unwrap(), Err(Failure::Gone), "{path}");
    }
    assert_eq!(status(&server.talk(format!("GET / HTTP/1.1\r\n{CLOSE}\r\n").as_bytes())), 200);
    assert_eq!(server.stop(), 0);
}

#[test]
fn stopping_lets_requests_end_and_closes_what_is_idle() {
    let barrier = Arc::new(Barrier::new(2));
    let handler_barrier = Arc::clone(&barrier);
    let server = Running::new(limits(), move |request: &Request, responder: &mut Responder| {
        if request.path == "/" {
            return echo(request, responder);
        }
        responder.start_events()?;
        handler_barrier.wait();
        handler_barrier.wait();
        responder.event(&request.path)?;
        responder.finish()
    });
    let (mut idle, mut busy) = (server.connect(), server.connect());
    idle.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    read_until(&mut idle, "|");
    busy.write_all(b"GET /late HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    barrier.wait();
    server.stopper.stop();
    assert_eq!(read_to_end(&mut idle), "", "an idle connection is closed at once");
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(server.address).is_ok() {
        assert!(Instant::now() < deadline, "connections are still accepted");
    }
    barrier.wait();
    assert!(read_to_end(&mut busy).ends_with("data: /late\n\n\r\n0\r\n\r\n"));
    assert_eq!(server.stop(), 0);
}

#[test]
fn stopping_cuts_off_what_does_not_end() {
    let (handler, steps) = wait_until_gone();
    let limits = Limits { drain_time: Duration::from_millis(100), ..limits() };
    let server = Running::new(limits, handler);
    let (mut busy, mut slow) = (server.connect(), server.connect());
    busy.write_all(WAIT.as_bytes()).unwrap();
    assert_eq!(steps.recv_timeout(PATIENCE), Ok("started"));
    // This one never sends the body that it is asked for.
    slow.write_all(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
    )
    .unwrap();
    read_until(&mut slow, "\r\n\r\n");
    assert_eq!(server.stop(), 2);
    assert_eq!(steps.recv_timeout(PATIENCE), Ok("gone"));
    assert_eq!((read_to_end(&mut busy), read_to_end(&mut slow)), (String::new(), String::new()));
}

#[test]
fn a_new_connection_takes_the_place_of_an_idle_one_and_is_turned_away_otherwise() {
    let (handler, steps) = wait_until_gone();
    let server = Running::new(Limits { connections: 2, ..limits() }, handler);
    let mut busy = server.connect();
    busy.write_all(WAIT.as_bytes()).unwrap();
    assert_eq!(steps.recv_timeout(PATIENCE), Ok("started"));
    let deadline = Instant::now() + PATIENCE;
    let connect_and_ask = || {
        loop {
            let mut stream = server.connect();
            stream.write_all(b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            assert!(Instant::now() < deadline, "no idle connection makes room");
            let answer = read_until(&mut stream, "\r\n\r\n");
            // The one that has its answer may not be idle yet.
            if status(&answer) == 200 {
                read_until(&mut stream, "|");
                return stream;
            }
        }
    };
    let mut idle = connect_and_ask();
    for _ in 0..3 {
        let next = connect_and_ask();
        assert_eq!(read_to_end(&mut idle), "", "the idle one makes room");
        idle = next;
    }
    idle.write_all(WAIT.as_bytes()).unwrap();
    assert_eq!(steps.recv_timeout(PATIENCE), Ok("started"));
    let refused = read_to_end(&mut server.connect());
    assert_eq!(status(&refused), 503, "{refused}");
    assert_eq!(error_code(&refused).unwrap(), "unavailable");
    assert!(refused.contains("\r\nRetry-After: 1\r\n"), "{refused}");
}

fn list(entries: &[&str]) -> Vec<String> {
    entries.iter().map(|entry| entry.to_string()).collect()
}

#[test]
fn only_names_of_this_machine_and_listed_hosts_are_served() {
    let allowed = list(&["proxy.example", "10.0.0.5:8000"]);
    for host in [
        "",
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1",
        "127.1.2.3:80",
        "[::1]",
        "[::1]:8000",
        "[::ffff:127.0.0.1]",
        "proxy.example",
        "Proxy.Example.:443",
        "10.0.0.5",
        "10.0.0.5:9",
    ] {
        assert_eq!(check_host(host, &allowed), Ok(()), "{host}");
    }
    for host in [
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "10.0.0.6",
        "0.0.0.0",
        "[::]",
        "::1",
        "localhost:port",
        "localhost:80:80",
        "localhost:123456",
        "user@localhost",
        "localhost@evil.example",
        "localhost/",
        "local host",
        "[::1",
        "[::1]x",
        ".",
        ":80",
        "[]",
        "proxy.example.evil",
        "xproxy.example",
        "2130706433",
        "127.1",
        "*",
    ] {
        let refusal = check_host(host, &allowed).expect_err(host);
        assert_eq!((refusal.status, refusal.code), (403, Some("host_not_allowed")), "{host}");
        let names_both = refusal.message.contains(&format!("{host:?}"));
        assert!(names_both && refusal.message.contains("--allowed-host"), "{}", refusal.message);
        assert!(check_host(host, &list(&["*"])).is_ok(), "{host}");
    }
    assert!(check_host("localhost", &[]).is_ok() && check_host("10.0.0.5", &[]).is_err());
}

#[test]
fn only_the_whole_key_opens() {
    for authorization in ["Bearer sk-é1", "bearer sk-é1"] {
        assert_eq!(check_key(Some(authorization), "sk-é1"), Ok(()));
    }
    for authorization in [
        "",
        "Bearer",
        "Bearer ",
        "sk-é1",
        "Basic sk-é1",
        "Bearer sk-é",
        "Bearer sk-é12",
        "Bearer  sk-é1",
        "Bearer sk-e1",
        "Bearer tk-é1",
        "Bearer sk-é1 ",
        "Bearersk-é1",
    ] {
        let refusal = check_key(Some(authorization), "sk-é1").expect_err(authorization);
        assert_eq!((refusal.status, refusal.code), (401, Some("invalid_api_key")));
        assert!(!refusal.message.contains("sk"), "the key is not told");
    }
    assert!(check_key(None, "a").is_err() && check_key(Some("Bearer "), "").is_err());
}

#[test]
fn only_pages_of_listed_origins_read_answers() {
    let page = "http://localhost:5173";
    let keys = |origin, asked, allowed: &[&str]| {
        let headers = cors_headers(origin, asked, &list(allowed));
        headers.into_iter().map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>()
    };
    let nothing: [&str; 0] = [];
    assert_eq!(keys(Some(page), Some("authorization"), &[]), nothing);
    for origin in [
        None,
        Some("null"),
        Some("http://localhost"),
        Some("https://localhost:5173"),
        Some("http://localhost:51734"),
        Some("http://localhost:5173.evil.example"),
    ] {
        assert_eq!(keys(origin, Some("authorization"), &[page]), ["Vary: Origin"], "{origin:?}");
    }
    let exposed = "Access-Control-Expose-Headers: x-request-id, Retry-After";
    let own = format!("Access-Control-Allow-Origin: {page}");
    assert_eq!(
        keys(Some(page), None, &["tauri://localhost", page]),
        ["Vary: Origin", &own, exposed]
    );
    assert_eq!(
        keys(Some(page), Some("authorization,content-type"), &["*"]),
        [
            "Access-Control-Allow-Origin: *",
            exposed,
            "Access-Control-Allow-Methods: GET, POST, OPTIONS",
            "Access-Control-Allow-Headers: authorization,content-type",
            "Access-Control-Max-Age: 600",
        ]
    );
}

#[test]
fn listening_beyond_this_machine_needs_a_key_or_a_will() {
    for (ip, is_loopback) in [
        ("127.0.0.1", true),
        ("127.8.8.8", true),
        ("::1", true),
        ("::ffff:127.0.0.1", true),
        ("0.0.0.0", false),
        ("::", false),
        ("192.168.1.2", false),
    ] {
        let check = |has_key, insecure| check_bind(ip.parse().unwrap(), has_key, insecure);
        assert_eq!(check(false, false).is_ok(), is_loopback, "{ip}");
        assert!(check(true, false).is_ok() && check(false, true).is_ok(), "{ip}");
    }
    let error = check_bind("0.0.0.0".parse().unwrap(), false, false).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    assert!(error.to_string().contains("0.0.0.0") && error.to_string().contains("--api-key"));
}

#[test]
fn a_taken_port_is_an_error_that_names_it() {
    let server = Running::new(limits(), echo);
    let error = Server::bind(server.address, limits()).err().unwrap().to_string();
    assert!(error.contains(&server.address.to_string()), "{error}");
}

#[test]
fn a_server_on_every_address_is_woken_to_stop() {
    let server = Server::bind("0.0.0.0:0".parse().unwrap(), limits()).unwrap();
    let stopper = server.stopper();
    let thread = std::thread::spawn(move || server.run(echo));
    std::thread::sleep(Duration::from_millis(20));
    stopper.stop();
    assert_eq!(thread.join().unwrap(), 0);
}
