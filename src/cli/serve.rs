//! `coli serve`: the model behind an OpenAI endpoint on loopback.
//!
//! The address is taken before the model is loaded: a port in use is known at once, and until the
//! model is there clients are told to come back. SIGINT and SIGTERM let the request that runs end
//! within ten seconds; a second one ends the process.

#![forbid(unsafe_code)]

use super::load::Setup;
use super::{Args, Flag, Verb, load, note};
use crate::error::{Error, Result};
use crate::http::{self, Limits};
use crate::server::{self, Settings};
use crate::sys;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "serve",
    positional: "",
    summary: "answer OpenAI clients on this machine",
    example: "coli serve --model oracle/demo --port 8000",
    flags: &[
        load::MODEL_FLAGS,
        load::PLAN_FLAGS,
        load::FLAGS,
        load::LEARN_FLAGS,
        &[
            Flag::value("--host", "ADDRESS", "address to listen on (default 127.0.0.1)"),
            Flag::value("--port", "N", "port, 0 takes a free one (default 8000)"),
            Flag::value("--api-key", "KEY", "what clients must send as a bearer token")
                .or_env("COLI_API_KEY"),
            Flag::value("--model-id", "NAME", "the model's name (default: its directory's)")
                .or_env("COLI_MODEL_ID"),
            Flag::value("--kv-slots", "N", "conversations that stay computed (default 1)"),
            Flag::value("--sessions", "DIR", "save conversations here, for the next start"),
            Flag::value("--sessions-gb", "GB", "most bytes of those (default 20)"),
            Flag::value("--queue", "N", "requests that may wait (default 16)"),
            Flag::value("--queue-timeout", "S", "seconds that one waits at most (default 60)"),
            Flag::value("--allowed-host", "NAME", "another name of this machine; * is any")
                .repeated(),
            Flag::value("--cors-origin", "URL", "let pages of this origin in; * is any").repeated(),
            Flag::switch("--allow-insecure-bind", "listen beyond loopback without a key"),
        ],
    ],
    run: serve,
};

fn serve(args: &Args) -> Result<()> {
    let host = args.get("--host").unwrap_or("127.0.0.1");
    let Ok(ip) = host.parse::<IpAddr>() else {
        return Err(Error::usage(format!("--host: expected an IP address, found {host:?}")));
    };
    let port = args.number("--port", 0..=u16::MAX)?.unwrap_or(8000);
    let settings = settings(args)?;
    http::check_bind(ip, settings.api_key.is_some(), args.has("--allow-insecure-bind"))?;
    let mut setup = Setup::new(args, 0)?;
    setup.hold_sessions(settings.kv_slots);
    setup.check_text()?;
    let listener = http::Server::bind(SocketAddr::new(ip, port), Limits::default())?;
    let mut loaded = None;
    let open = || {
        let engine = Arc::new(setup.open(usize::MAX)?);
        sys::catch_terminations();
        loaded = Some((Arc::clone(&engine), load::open_usage(args, &engine)));
        Ok(engine)
    };
    let is_ended = || sys::interrupted() || sys::terminated();
    let cut = server::run(listener, settings, open, is_ended)?;
    if let Some((engine, usage)) = loaded {
        load::save_usage(usage, &engine);
    }
    if cut > 0 {
        note(&format!("coli: {cut} requests were cut off\n"));
    }
    if sys::interrupted() { Err(Error::interrupted()) } else { Ok(()) }
}

fn settings(args: &Args) -> Result<Settings> {
    let dir = Path::new(args.required("--model")?);
    let name = dir.canonicalize().ok().and_then(|dir| Some(dir.file_name()?.to_owned()));
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let seconds: f64 = args.number("--queue-timeout", 0.1..=240.0)?.unwrap_or(60.0);
    let sessions_gb: f64 = args.number("--sessions-gb", 0.0..=1e6)?.unwrap_or(20.0);
    let sessions_bytes = (sessions_gb * 1e9) as u64;
    let key = args.get("--api-key");
    if key.is_some_and(|key| key.is_empty() || key.chars().any(|c| !c.is_ascii_graphic())) {
        return Err(Error::usage("--api-key: expected printable letters without spaces"));
    }
    Ok(Settings {
        model_id: args.get("--model-id").map(String::from).or(name).unwrap_or("glm-5.2".into()),
        api_key: key.map(String::from),
        allowed_hosts: args.all("--allowed-host"),
        cors_origins: args.all("--cors-origin"),
        kv_slots: args.number("--kv-slots", 1..=64)?.unwrap_or(1),
        sessions: args.get("--sessions").map(|dir| (PathBuf::from(dir), sessions_bytes)),
        queue: args.number("--queue", 0..=10_000)?.unwrap_or(16),
        queue_time: Duration::from_secs_f64(seconds),
        keepalive_time: Duration::from_secs(5),
        log: |text| note(&format!("coli: {text}\n")),
    })
}
