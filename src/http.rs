//! HTTP/1.1 for one small server: connections, requests, responses. It knows nothing about models.
//!
//! Each connection has a thread that reads a request, calls the [`Handler`] and writes what it
//! answers. Everything a client can make large or slow has a bound in [`Limits`], and each refusal
//! is a JSON object of the shape `{"error":{"message","type","param","code"}}`, in which clients
//! look for the reason. Refused are: lines that do not end with CRLF, folded headers, both kinds of
//! body framing at once, a second Host or Content-Length, and any version but 1.0 and 1.1 — all
//! that two programs could read differently. There is no TLS and no compression.

#![forbid(unsafe_code)]

mod policy;
mod request;
mod responder;
mod wire;

use crate::error::{Context, Result};
use crate::json::write_str_compact;
pub use policy::{check_bind, check_host, check_key, cors_headers};
pub use request::Request;
pub use responder::Responder;
use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use wire::Wire;

/// Stack of a connection's thread: enough for any JSON that its reader admits.
const STACK_BYTES: usize = 512 << 10;

/// How long the listener waits: for the connection that wakes it, for a client that it turns away,
/// and for a descriptor when the system has none left.
const PAUSE: Duration = Duration::from_millis(100);

/// What clients may use of the server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time. A further one takes the place of the one that idles longest; when
    /// none does, it is answered 503.
    pub connections: usize,
    /// Requests on one connection.
    pub requests_per_connection: usize,
    /// Length of the request line (414).
    pub request_line_bytes: usize,
    /// Length of the request line and all headers; of all trailers, too (431).
    pub head_bytes: usize,
    /// Number of headers; of trailers, too (431).
    pub headers: usize,
    /// Length of a body, without its framing (413).
    pub body_bytes: usize,
    /// Wait for the first byte of a request; then the connection is closed without a word.
    pub idle_time: Duration,
    /// From the first byte of a request to the end of its headers (408).
    pub head_time: Duration,
    /// From there to the end of its body (408).
    pub body_time: Duration,
    /// Time in which the client must take any 64 KiB that are written; else it counts as gone.
    pub write_time: Duration,
    /// From the call to stop until the requests that still run are cut off.
    pub drain_time: Duration,
}

impl Default for Limits {
    /// Bodies of 32 MiB: agents send 1 to 2 MB of history.
    fn default() -> Limits {
        Limits {
            connections: 256,
            requests_per_connection: 1000,
            request_line_bytes: 8 << 10,
            head_bytes: 16 << 10,
            headers: 64,
            body_bytes: 32 << 20,
            idle_time: Duration::from_secs(60),
            head_time: Duration::from_secs(10),
            body_time: Duration::from_secs(60),
            write_time: Duration::from_secs(30),
            drain_time: Duration::from_secs(10),
        }
    }
}

/// Statuses in use: reason phrase, `type` and usual `code` of the error object.
const STATUSES: [(u16, &str, &str, Option<&str>); 18] = [
    (200, "OK", "", None),
    (204, "No Content", "", None),
    (400, "Bad Request", "invalid_request_error", None),
    (401, "Unauthorized", "authentication_error", Some("invalid_api_key")),
    (403, "Forbidden", "permission_error", Some("forbidden")),
    (404, "Not Found", "invalid_request_error", Some("not_found")),
    (405, "Method Not Allowed", "invalid_request_error", Some("method_not_allowed")),
    (408, "Request Timeout", "invalid_request_error", Some("request_timeout")),
    (411, "Length Required", "invalid_request_error", Some("length_required")),
    (413, "Content Too Large", "invalid_request_error", Some("request_too_large")),
    (414, "URI Too Long", "invalid_request_error", Some("uri_too_long")),
    (417, "Expectation Failed", "invalid_request_error", Some("expectation_failed")),
    (429, "Too Many Requests", "rate_limit_error", Some("rate_limited")),
    (431, "Request Header Fields Too Large", "invalid_request_error", Some("headers_too_large")),
    (500, "Internal Server Error", "server_error", Some("internal_error")),
    (501, "Not Implemented", "server_error", Some("not_implemented")),
    (503, "Service Unavailable", "server_error", Some("unavailable")),
    (505, "HTTP Version Not Supported", "server_error", Some("http_version_not_supported")),
];

fn status_row(status: u16) -> (u16, &'static str, &'static str, Option<&'static str>) {
    let row = STATUSES.iter().find(|row| row.0 == status);
    *row.unwrap_or_else(|| panic!("status {status} has no row"))
}

/// A request that is answered with an error.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// HTTP status; the reason phrase and the `type` follow from it.
    pub status: u16,
    /// What was wrong, for a person.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// What was wrong, for a program.
    pub code: Option<&'static str>,
    /// Headers of the answer, such as `Allow`.
    pub headers: Vec<(&'static str, String)>,
}

impl Refusal {
    /// A refusal with the usual code of `status`.
    pub fn new(status: u16, message: impl Into<String>) -> Refusal {
        let code = status_row(status).3;
        Refusal { status, message: message.into(), param: None, code, headers: Vec::new() }
    }

    /// With another code.
    pub fn code(self, code: &'static str) -> Refusal {
        Refusal { code: Some(code), ..self }
    }

    /// With the field at fault.
    pub fn param(self, param: impl Into<String>) -> Refusal {
        Refusal { param: Some(param.into()), ..self }
    }

    /// With a further header.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Refusal {
        self.headers.push((name, value.into()));
        self
    }

    /// The error object, compact; also what a stream sends when it fails half-way.
    pub fn to_json(&self) -> String {
        let kind = Some(status_row(self.status).2);
        let mut json = String::from("{\"error\":{\"message\":");
        write_str_compact(&mut json, &self.message);
        for (key, text) in [("type", kind), ("param", self.param.as_deref()), ("code", self.code)] {
            json += &format!(",\"{key}\":");
            match text {
                Some(text) => write_str_compact(&mut json, text),
                None => json += "null",
            }
        }
        json + "}}"
    }
}

/// Why a request did not get its answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// The client hung up, or does not take what is written.
    Gone,
    /// It is answered with an error.
    Refused(Refusal),
}

/// What becomes of a request, or of a step on the way to its answer.
pub type Outcome<T = ()> = std::result::Result<T, Failure>;

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::Refused(refusal)
    }
}

/// What answers requests; a closure with the signature of [`Handler::handle`] is one.
pub trait Handler: Send + Sync + 'static {
    /// Looks at a request before its body is read, so that a client without the key cannot fill
    /// the memory; may set headers of the answer.
    fn admit(&self, _request: &Request, _responder: &mut Responder) -> Outcome {
        Ok(())
    }

    /// Answers a request. A refusal is written for it, unless an answer has begun: that is then
    /// cut off, so that no client takes it for complete. A panic counts as a refusal with 500.
    fn handle(&self, request: &Request, responder: &mut Responder) -> Outcome;
}

impl<F> Handler for F
where
    F: Fn(&Request, &mut Responder) -> Outcome + Send + Sync + 'static,
{
    fn handle(&self, request: &Request, responder: &mut Responder) -> Outcome {
        self(request, responder)
    }
}

/// A bound listener.
pub struct Server {
    listener: TcpListener,
    shared: Arc<Shared>,
}

/// Ends [`Server::run`] from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

struct Shared {
    limits: Limits,
    address: SocketAddr,
    state: Mutex<State>,
    /// Signalled when a connection has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    stopping: bool,
    next_id: u64,
    connections: BTreeMap<u64, Connection>,
}

struct Connection {
    stream: Arc<TcpStream>,
    /// Since when it waits for a request; `None` while it has one.
    idle_since: Option<Instant>,
}

impl Server {
    /// Listens; port 0 takes a free one. Errors: the system's, with the address.
    pub fn bind(address: SocketAddr, limits: Limits) -> Result<Server> {
        let listener = TcpListener::bind(address).context(|| format!("listen on {address}"))?;
        let address = listener.local_addr().context(|| format!("listen on {address}"))?;
        let (state, ended) = (Mutex::default(), Condvar::new());
        Ok(Server { listener, shared: Arc::new(Shared { limits, address, state, ended }) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// The handle that ends [`Server::run`].
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Serves until it is stopped: then nothing more is accepted, connections without a request
    /// are closed, and the others have [`Limits::drain_time`] to end. Returns how many did not and
    /// were cut off; their handlers may still run, and see a client that is gone.
    pub fn run(self, handler: impl Handler) -> usize {
        let handler = Arc::new(handler);
        loop {
            let accepted = self.listener.accept();
            if self.shared.lock().stopping {
                break;
            }
            match accepted {
                Ok((stream, _)) => self.shared.start(stream, &handler),
                // Out of descriptors, mostly: without a rest the loop would spin.
                Err(_) => thread::sleep(PAUSE),
            }
        }
        drop(self.listener);
        self.shared.drain()
    }
}

impl Stopper {
    /// Makes [`Server::run`] end; returns at once.
    pub fn stop(&self) {
        self.0.lock().stopping = true;
        // Wakes the listener, on loopback if it listens on every address. If this fails, others
        // are in the queue and wake it.
        let _ = TcpStream::connect_timeout(&self.0.address, PAUSE);
    }
}

impl Shared {
    /// The state is whole between any two statements, whoever panicked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a new connection its thread.
    fn start(self: &Arc<Shared>, stream: TcpStream, handler: &Arc<impl Handler>) {
        let stream = Arc::new(stream);
        let Some(id) = self.register(&stream) else {
            let mut wire = Wire::new(stream, PAUSE);
            let refusal = Refusal::new(503, "too many connections").header("Retry-After", "1");
            let _ = Responder::new(&mut wire, &Request::default()).refuse(&refusal);
            // Closing with unread bytes would take the answer away from the client.
            wire.is_gone();
            return;
        };
        let registered = Registered { shared: Arc::clone(self), id };
        let handler = Arc::clone(handler);
        let serve = move || registered.serve(stream, &*handler);
        // Without a thread the connection is closed and forgotten, as `serve` is dropped.
        let _ = thread::Builder::new().name("http".into()).stack_size(STACK_BYTES).spawn(serve);
    }

    /// Counts a connection in; `None` when there are too many and none is idle.
    fn register(&self, stream: &Arc<TcpStream>) -> Option<u64> {
        let mut state = self.lock();
        if state.connections.len() >= self.limits.connections {
            let idle = |(id, c): (&u64, &Connection)| c.idle_since.map(|since| (since, *id));
            let (_, longest) = state.connections.iter().filter_map(idle).min()?;
            let connection = state.connections.remove(&longest);
            let _ = connection.map(|connection| connection.stream.shutdown(Shutdown::Both));
        }
        let id = state.next_id;
        state.next_id += 1;
        let connection = Connection { stream: Arc::clone(stream), idle_since: None };
        state.connections.insert(id, connection);
        Some(id)
    }

    /// Notes whether a connection waits for a request. False when it should not wait any more.
    fn set_idle(&self, id: u64, idle: bool) -> bool {
        let mut state = self.lock();
        let stopping = state.stopping;
        let Some(connection) = state.connections.get_mut(&id) else { return false };
        connection.idle_since = idle.then(Instant::now);
        !stopping
    }

    /// Closes what is idle, waits for what is not, and cuts off and counts what does not end.
    fn drain(&self) -> usize {
        let deadline = Instant::now() + self.limits.drain_time;
        let mut state = self.lock();
        for connection in state.connections.values().filter(|c| c.idle_since.is_some()) {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        while !state.connections.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        for connection in state.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        state.connections.len()
    }
}

/// A connection that counts; it is counted out when dropped.
struct Registered {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.lock().connections.remove(&self.id);
        self.shared.ended.notify_all();
    }
}

impl Registered {
    /// Serves one connection to its end.
    fn serve(&self, stream: Arc<TcpStream>, handler: &impl Handler) {
        let limits = &self.shared.limits;
        // An event is one small write, which must not wait for the next.
        let _ = stream.set_nodelay(true);
        let mut wire = Wire::new(stream, limits.write_time);
        for request in 1..=limits.requests_per_connection {
            if wire.pending().is_empty() {
                let wait = self.shared.set_idle(self.id, true);
                let waited = wait && wire.fill(Instant::now() + limits.idle_time).is_ok();
                if !self.shared.set_idle(self.id, false) || !waited {
                    return;
                }
            }
            if !self.exchange(&mut wire, handler, request < limits.requests_per_connection) {
                return;
            }
        }
    }

    /// Reads one request and answers it. False when the connection is to be closed.
    fn exchange(&self, wire: &mut Wire, handler: &impl Handler, may_keep: bool) -> bool {
        let limits = &self.shared.limits;
        let (mut request, head) = match Request::read_head(wire, limits) {
            Ok(request) => (request, Ok(())),
            Err(failure) => (Request::default(), Err(failure)),
        };
        let keep = may_keep && request.keep_alive && !self.shared.lock().stopping;
        let mut responder = Responder::new(wire, &request);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            head?;
            // An answer before the end of the body is the last one on this connection.
            responder.set_keep_alive(keep && !request.has_body());
            handler.admit(&request, &mut responder)?;
            request.read_body(responder.wire(), limits)?;
            responder.set_keep_alive(keep);
            handler.handle(&request, &mut responder)
        }));
        responder.conclude(outcome.unwrap_or_else(|_| {
            Err(Refusal::new(500, "the server failed; its log says more").into())
        }))
    }
}
