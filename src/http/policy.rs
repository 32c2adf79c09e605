//! Who may talk to the server: pure functions over addresses and header values.
//!
//! A server on loopback is reachable by every page that a browser on this machine shows: a page
//! can send requests anywhere, and DNS can make its own name point here. The Host header gives the
//! second away; the first is harmless as long as the browser keeps the answers from the page,
//! which it does unless CORS headers allow otherwise.

#![forbid(unsafe_code)]

use super::Refusal;
use crate::error::{Error, Result};
use std::net::IpAddr;

/// Refuses to listen where others can reach the server when no key protects it. Error: a wrong
/// usage that names the ways out.
pub fn check_bind(ip: IpAddr, has_key: bool, insecure_allowed: bool) -> Result<()> {
    if ip.to_canonical().is_loopback() || has_key || insecure_allowed {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{ip} can be reached from other machines: expected --api-key, or --allow-insecure-bind"
    )))
}

/// Refuses with 403 a host that is neither loopback nor in `allowed`, where `*` stands for every
/// one; ports do not matter. None at all is allowed: no browser leaves it
/// out.
pub fn check_host(host: &str, allowed: &[String]) -> std::result::Result<(), Refusal> {
    let name = host_name(host);
    let is_named = |entry: &String| name.is_some() && host_name(entry) == name;
    if host.is_empty()
        || name.as_deref().is_some_and(is_loopback)
        || allowed.iter().any(|entry| entry == "*" || is_named(entry))
    {
        return Ok(());
    }
    let message = format!("the host {host:?} is not allowed; --allowed-host adds one");
    Err(Refusal::new(403, message).code("host_not_allowed"))
}

fn is_loopback(name: &str) -> bool {
    name == "localhost" || name.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback())
}

/// The name in `name`, `name:port` or `[address]:port`, in small letters and without the dot that
/// may end it. `None` for anything else.
fn host_name(host: &str) -> Option<String> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let port = port.strip_prefix(':').or(port.is_empty().then_some(""))?;
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    let is_port = port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    (!name.is_empty() && name.chars().all(is_name) && is_port).then(|| name.to_ascii_lowercase())
}

/// Refuses with 401 unless `authorization` is `Bearer` and the key. How long that takes depends on
/// what was sent and on the length of the key, not on its letters.
pub fn check_key(authorization: Option<&str>, key: &str) -> std::result::Result<(), Refusal> {
    let (scheme, sent) = authorization.and_then(|value| value.split_once(' ')).unwrap_or_default();
    let differs = |difference, (a, b): (u8, u8)| std::hint::black_box(difference | (a ^ b));
    let difference = sent.bytes().zip(key.bytes()).fold(0, differs);
    let is_same = sent.len() == key.len() && difference == 0 && !key.is_empty();
    if scheme.eq_ignore_ascii_case("bearer") && is_same {
        return Ok(());
    }
    let message = "expected \"Authorization: Bearer\" with the key of this server";
    Err(Refusal::new(401, message).header("WWW-Authenticate", "Bearer"))
}

/// The headers that let a page of `origin` read the answer, if `allowed` lists it, exactly or by
/// `*`. With `asked`, the headers that a preflight (OPTIONS) asks for, they let it send them.
pub fn cors_headers(
    origin: Option<&str>,
    asked: Option<&str>,
    allowed: &[String],
) -> Vec<(&'static str, String)> {
    let any = allowed.iter().any(|entry| entry == "*");
    let mut headers = Vec::new();
    if !any && !allowed.is_empty() {
        // A cache must not give one origin's answer to another.
        headers.push(("Vary", "Origin".into()));
    }
    let Some(origin) = origin.filter(|origin| any || allowed.iter().any(|a| a == origin)) else {
        return headers;
    };
    headers.push(("Access-Control-Allow-Origin", if any { "*" } else { origin }.into()));
    headers.push(("Access-Control-Expose-Headers", "x-request-id, Retry-After".into()));
    if let Some(asked) = asked {
        headers.push(("Access-Control-Allow-Methods", "GET, POST, OPTIONS".into()));
        headers.push(("Access-Control-Allow-Headers", asked.into()));
        headers.push(("Access-Control-Max-Age", "600".into()));
    }
    headers
}
