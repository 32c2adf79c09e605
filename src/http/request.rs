//! Requests: the head, checked as it arrives, and the body by either framing.

#![forbid(unsafe_code)]

use super::wire::Wire;
use super::{Limits, Outcome, Refusal};
use std::time::Instant;

/// Methods that are known; a resource may still not have one of them.
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// Longest line with the size of a chunk, extensions included.
const CHUNK_LINE_BYTES: usize = 256;

/// A request.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// One of the known methods, in capitals.
    pub method: String,
    /// The path as it was sent, without the query.
    pub path: String,
    /// The parts of the path between slashes, percent-decoded; empty ones are left out, so that
    /// `/v1//models/` has two.
    pub segments: Vec<String>,
    /// What follows the question mark, as it was sent.
    pub query: String,
    /// Name and port that the client takes this server for; empty if HTTP/1.0 does not say.
    pub host: String,
    /// The body, without its framing; empty in [`super::Handler::admit`].
    pub body: Vec<u8>,
    /// Whether the client speaks HTTP/1.1: it then understands chunks.
    pub(super) is_1_1: bool,
    /// Whether the client wants to send further requests.
    pub(super) keep_alive: bool,
    /// Names in small letters.
    headers: Vec<(String, String)>,
    framing: Framing,
}

/// How the end of the body is found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Framing {
    #[default]
    None,
    Length(usize),
    Chunked,
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal::new(400, message)
}

impl Request {
    /// The value of the first header `name`, which is in small letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.values(name).next()
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.headers.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The elements of all headers `name`, which are lists.
    fn elements(&self, name: &str) -> impl Iterator<Item = &str> {
        self.values(name).flat_map(|value| value.split(',')).map(trim).filter(|e| !e.is_empty())
    }

    fn lists(&self, name: &str, element: &str) -> bool {
        self.elements(name).any(|found| found.eq_ignore_ascii_case(element))
    }

    pub(super) fn has_body(&self) -> bool {
        !matches!(self.framing, Framing::None | Framing::Length(0))
    }

    /// Reads request line and headers. Errors: the client is gone, or the refusal it gets.
    pub(super) fn read_head(wire: &mut Wire, limits: &Limits) -> Outcome<Request> {
        let deadline = Instant::now() + limits.head_time;
        let line_max = limits.request_line_bytes;
        let too_long =
            || Refusal::new(414, format!("the request line is longer than {line_max} bytes"));
        let mut line = wire.line(line_max, deadline, too_long)?;
        // Some clients end a body with a CRLF that does not count.
        if line.is_empty() {
            line = wire.line(line_max, deadline, too_long)?;
        }
        let mut request = parse_request_line(&line)?;
        let head_max = limits.head_bytes.saturating_sub(line.len());
        request.headers = read_headers(wire, limits, head_max, deadline)?;
        request.check(limits)?;
        Ok(request)
    }

    /// Checks what the headers say together, and notes what they say about framing.
    fn check(&mut self, limits: &Limits) -> Result<(), Refusal> {
        let hosts: Vec<&str> = self.values("host").collect();
        match hosts[..] {
            [] if self.is_1_1 => return Err(bad("no Host")),
            [] => {}
            // An absolute target has named the host already.
            [host] if self.host.is_empty() => self.host = host.into(),
            [_] => {}
            _ => return Err(bad("more than one Host")),
        }
        self.framing = self.find_framing(limits)?;
        let is_known = |expected: &str| expected.eq_ignore_ascii_case("100-continue");
        if self.is_1_1 && !self.elements("expect").all(is_known) {
            return Err(Refusal::new(417, "only Expect: 100-continue is offered"));
        }
        let exception = if self.is_1_1 { "close" } else { "keep-alive" };
        self.keep_alive = self.lists("connection", exception) != self.is_1_1;
        Ok(())
    }

    fn find_framing(&self, limits: &Limits) -> Result<Framing, Refusal> {
        let lengths: Vec<&str> = self.values("content-length").collect();
        let codings: Vec<&str> = self.values("transfer-encoding").collect();
        match (&lengths[..], &codings[..]) {
            ([], []) if ["POST", "PUT", "PATCH"].contains(&self.method.as_str()) => {
                Err(Refusal::new(411, "expected Content-Length or Transfer-Encoding: chunked"))
            }
            ([], []) => Ok(Framing::None),
            ([], _) if !self.is_1_1 => Err(bad("Transfer-Encoding is not part of HTTP/1.0")),
            ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => Ok(Framing::Chunked),
            ([], _) => Err(Refusal::new(501, "only Transfer-Encoding: chunked is offered")),
            ([digits], []) if is_all(digits, u8::is_ascii_digit) => {
                let length = digits.parse().ok().filter(|length| *length <= limits.body_bytes);
                length.map(Framing::Length).ok_or_else(|| too_large(limits))
            }
            ([_], []) => Err(bad("Content-Length is not a number")),
            (_, []) => Err(bad("more than one Content-Length")),
            _ => Err(bad("both Content-Length and Transfer-Encoding")),
        }
    }

    /// Reads the body; first says that it is welcome, should the client wait for that. Errors: the
    /// client is gone, or the refusal it gets.
    pub(super) fn read_body(&mut self, wire: &mut Wire, limits: &Limits) -> Outcome {
        let deadline = Instant::now() + limits.body_time;
        if self.has_body() && self.is_1_1 && self.lists("expect", "100-continue") {
            wire.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        match self.framing {
            Framing::None => Ok(()),
            Framing::Length(length) => wire.take(length, &mut self.body, deadline),
            Framing::Chunked => read_chunks(wire, limits, deadline, &mut self.body),
        }
    }
}

fn too_large(limits: &Limits) -> Refusal {
    Refusal::new(413, format!("the body is longer than {} bytes", limits.body_bytes))
}

/// Whether all bytes of a text, which is not empty, are of one kind.
fn is_all(text: &str, is_one: impl Fn(&u8) -> bool) -> bool {
    !text.is_empty() && text.as_bytes().iter().all(is_one)
}

/// Without the spaces and tabs that may surround a value.
fn trim(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// Splits `METHOD target HTTP/1.1`. The headers are still missing.
fn parse_request_line(line: &str) -> Result<Request, Refusal> {
    let parts: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = parts[..] else {
        return Err(bad("the request line is not \"METHOD target HTTP/1.1\""));
    };
    let is_1_1 = match version {
        "HTTP/1.1" => true,
        "HTTP/1.0" => false,
        _ if version.starts_with("HTTP/") => {
            return Err(Refusal::new(505, "expected HTTP/1.1 or HTTP/1.0"));
        }
        _ => return Err(bad("the request line does not end with HTTP/1.1")),
    };
    if !METHODS.contains(&method) {
        return Err(Refusal::new(501, format!("the method {method} is not offered")));
    }
    if !is_all(target, u8::is_ascii_graphic) {
        return Err(bad("the target has bytes that need percent-encoding"));
    }
    let (host, target) = match target.split_once("://") {
        Some((scheme, rest)) if ["http", "https"].contains(&scheme) => {
            rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()))
        }
        _ if target.starts_with('/') || (target == "*" && method == "OPTIONS") => ("", target),
        _ => return Err(bad("the target is not a path")),
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut segments = Vec::new();
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        segments.push(percent_decode(segment).ok_or_else(|| {
            bad("the path has a % without two hexadecimal digits, or is not UTF-8")
        })?);
    }
    let [method, path, query, host] = [method, path, query, host].map(String::from);
    Ok(Request { method, path, segments, query, host, is_1_1, ..Request::default() })
}

fn percent_decode(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    for piece in pieces {
        let [high, low, rest @ ..] = piece.as_bytes() else { return None };
        bytes.push((digit(high)? * 16 + digit(low)?) as u8);
        bytes.extend_from_slice(rest);
    }
    String::from_utf8(bytes).ok()
}

/// Whether `text` may be the name of a header.
fn is_token(text: &str) -> bool {
    is_all(text, |byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// Reads headers, or trailers, up to the empty line.
fn read_headers(
    wire: &mut Wire,
    limits: &Limits,
    bytes_max: usize,
    deadline: Instant,
) -> Outcome<Vec<(String, String)>> {
    let mut left = bytes_max;
    let mut headers = Vec::new();
    loop {
        let line = wire.line(left, deadline, || {
            Refusal::new(431, format!("the headers are longer than {} bytes", limits.head_bytes))
        })?;
        if line.is_empty() {
            return Ok(headers);
        }
        if headers.len() == limits.headers {
            return Err(Refusal::new(431, format!("more than {} headers", limits.headers)).into());
        }
        left = left.saturating_sub(line.len());
        headers.push(parse_header(&line)?);
    }
}

fn parse_header(line: &str) -> Result<(String, String), Refusal> {
    let is_printable = |text: &str| !text.contains(|c: char| c.is_ascii_control() && c != '\t');
    match line.split_once(':').map(|(name, value)| (name, trim(value))) {
        Some((name, value)) if is_token(name) && is_printable(value) => {
            Ok((name.to_ascii_lowercase(), value.into()))
        }
        _ => Err(bad("a header is not \"Name: value\"")),
    }
}

/// Reads a chunked body with its trailers, which are checked and dropped.
fn read_chunks(wire: &mut Wire, limits: &Limits, deadline: Instant, body: &mut Vec<u8>) -> Outcome {
    loop {
        let long = || bad(format!("the line of a chunk is longer than {CHUNK_LINE_BYTES} bytes"));
        let line = wire.line(CHUNK_LINE_BYTES, deadline, long)?;
        let digits = trim(line.split(';').next().unwrap_or_default());
        if !is_all(digits, u8::is_ascii_hexdigit) {
            return Err(bad("a chunk does not begin with its size").into());
        }
        let size = usize::from_str_radix(digits, 16).ok();
        match size.filter(|size| *size <= limits.body_bytes - body.len()) {
            None => return Err(too_large(limits).into()),
            Some(0) => break,
            Some(size) => wire.take(size, body, deadline)?,
        }
        if !wire.line(CHUNK_LINE_BYTES, deadline, long)?.is_empty() {
            return Err(bad("a chunk is longer than its size").into());
        }
    }
    read_headers(wire, limits, limits.head_bytes, deadline)?;
    Ok(())
}
