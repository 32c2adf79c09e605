//! `coli serve`: an OpenAI endpoint for the programs of one machine.
//!
//! A thread per connection parses, checks and waits; one worker owns the sessions and computes all
//! replies, several in a pass, so that nothing about a model is ever shared by two threads. A
//! request is checked as a whole before it joins the line ([`queue`]), and is dropped from it when
//! its client hangs up. One that runs alone is stopped within one layer then, and one of several
//! after the pass.

#![forbid(unsafe_code)]

mod answer;
mod kept;
mod page;
mod queue;
mod worker;

use crate::api::{Ask, bad_request, model_object, prompt_ids, random_hex, render};
use crate::bail;
use crate::engine::Engine;
use crate::error::{Context, Result};
use crate::http::{self, Handler, Outcome, Refusal, Request, Responder};
use crate::json::{self, Value, object, to_compact};
use crate::sys;
use crate::tokenizer::{Special, Tokenizer};
use queue::Queue;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;
use worker::{Progress, Worker};

/// How often it is asked whether the server shall end.
const PAUSE: Duration = Duration::from_millis(50);

/// How a server serves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model's name.
    pub model_id: String,
    /// What clients must show to be served.
    pub api_key: Option<String>,
    /// Names beside loopback's that a client may call this machine; they matter without a key.
    pub allowed_hosts: Vec<String>,
    /// Origins whose pages may use the server.
    pub cors_origins: Vec<String>,
    /// Conversations that stay computed.
    pub kv_slots: usize,
    /// Directory and most bytes of saved conversations, if they are to be saved.
    pub sessions: Option<(PathBuf, u64)>,
    /// Requests that may wait.
    pub queue: usize,
    /// How long one waits at most.
    pub queue_time: Duration,
    /// The longest silence of an answer that has its turn.
    pub keepalive_time: Duration,
    /// Takes what an operator should know.
    pub log: fn(&str),
}

/// Serves until `is_ended`; then waits for requests that run, and returns how many were cut off.
/// While `load` reads the model, all requests are answered 503; then the log says where it serves
/// and what. Errors: those of `load`, a model without tokenizer, no memory for the sessions.
pub fn run(
    listener: http::Server,
    settings: Settings,
    load: impl FnOnce() -> Result<Arc<Engine>>,
    is_ended: impl Fn() -> bool + Send,
) -> Result<usize> {
    let queue = Queue::new(settings.kv_slots, settings.queue);
    let (engine, progress) = (OnceLock::new(), Mutex::default());
    let shared = Arc::new(Shared { engine, settings, queue, progress });
    let (address, stopper) = (listener.address(), listener.stopper());
    let end = || {
        shared.queue.close();
        stopper.stop();
    };
    thread::scope(|scope| {
        let routes = Routes(Arc::clone(&shared));
        let listening = scope.spawn(move || listener.run(routes));
        let served = load().and_then(|engine| {
            engine.tokenizer()?;
            let Settings { kv_slots, log, .. } = shared.settings;
            let engine = shared.engine.get_or_init(|| engine);
            let Shared { queue, progress, settings, .. } = &*shared;
            let worker = Worker::new(engine, queue, progress, settings)?;
            scope.spawn(move || {
                while !is_ended() {
                    thread::sleep(PAUSE);
                }
                end();
            });
            log(&format!(
                "{} on http://{address}/v1 · context {} tokens, prompt and reply together · \
                 kv-slots {kv_slots} · queue {} · {} a key",
                shared.settings.model_id,
                engine.options().ctx_tokens,
                shared.settings.queue,
                if shared.settings.api_key.is_some() { "with" } else { "without" },
            ));
            worker.run();
            Ok(())
        });
        // Again, for a model that did not load.
        end();
        let cut = listening.join().unwrap_or_else(|panic| resume_unwind(panic));
        served.map(|()| cut)
    })
}

struct Shared {
    /// Empty while the model is read.
    engine: OnceLock<Arc<Engine>>,
    settings: Settings,
    queue: Queue,
    progress: Mutex<Progress>,
}

struct Routes(Arc<Shared>);

/// What a path leads to.
#[derive(Clone, Copy)]
enum Route<'a> {
    Page,
    Health,
    Experts,
    Metrics,
    Models,
    Model(&'a [String]),
    Chat,
    Completion,
    Tokenize,
    Detokenize,
}

impl Route<'_> {
    /// By the path with or without `/v1`.
    fn find(segments: &[String]) -> Option<Route<'_>> {
        let rest = match segments {
            [first, rest @ ..] if first == "v1" => rest,
            all => all,
        };
        let names: Vec<&str> = rest.iter().map(String::as_str).collect();
        Some(match names[..] {
            [] => Route::Page,
            ["health"] => Route::Health,
            ["experts"] => Route::Experts,
            ["metrics"] => Route::Metrics,
            ["models"] => Route::Models,
            // A name may have slashes.
            ["models", ..] => Route::Model(&rest[1..]),
            ["chat", "completions"] => Route::Chat,
            ["completions"] => Route::Completion,
            ["tokenize"] => Route::Tokenize,
            ["detokenize"] => Route::Detokenize,
            _ => return None,
        })
    }

    /// Methods that it has, beside OPTIONS.
    fn methods(self) -> &'static str {
        match self {
            Route::Chat | Route::Completion | Route::Tokenize | Route::Detokenize => "POST",
            _ => "GET, HEAD",
        }
    }

    /// Whether it answers without a key.
    fn is_public(self) -> bool {
        matches!(self, Route::Page | Route::Health)
    }
}

impl Handler for Routes {
    fn admit(&self, request: &Request, responder: &mut Responder) -> Outcome {
        let Settings { allowed_hosts, cors_origins, .. } = &self.0.settings;
        responder.set_header("x-request-id", format!("req_{}", random_hex()));
        let asked = request.header("access-control-request-headers");
        for (name, value) in http::cors_headers(request.header("origin"), asked, cors_origins) {
            responder.set_header(name, value);
        }
        // A page behind a false name does not know the key.
        if self.0.settings.api_key.is_none() {
            http::check_host(&request.host, allowed_hosts)?;
        }
        let is_public = Route::find(&request.segments).is_some_and(Route::is_public);
        if request.method != "OPTIONS" && !is_public {
            self.0.check_key(request)?;
        }
        Ok(())
    }

    fn handle(&self, request: &Request, responder: &mut Responder) -> Outcome {
        if request.method == "OPTIONS" {
            return responder.respond(204, "", b"");
        }
        let Some(route) = Route::find(&request.segments) else {
            return Err(Refusal::new(404, format!("no route {:?}", request.path)).into());
        };
        let methods = route.methods();
        if !methods.split(", ").any(|method| method == request.method) {
            let message = format!("{} is offered for {:?}", methods, request.path);
            return Err(Refusal::new(405, message).header("Allow", methods).into());
        }
        match (route, self.0.engine.get()) {
            (_, Some(engine)) => self.0.answer(route, engine, request, responder),
            // It waits for the model, too.
            (Route::Page, None) => page::respond(responder),
            (_, None) => {
                let refusal = Refusal::new(503, "the model is being read").code("loading");
                Err(refusal.header("Retry-After", "5").into())
            }
        }
    }
}

fn respond(responder: &mut Responder, value: Value) -> Outcome {
    responder.respond_json(200, &to_compact(&value))
}

fn parse(request: &Request) -> Result<Value> {
    json::parse(&request.body, json::Limits::default()).context(|| "the body is not JSON")
}

/// The tokens of `messages` as they would be fed, or of the text `content` or `prompt`, in which
/// markers count unless `parse_special` is false.
fn tokenize(request: &Value, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    if request.get("messages").is_some() {
        return render(request)?.ids(tokenizer);
    }
    let Some(text) = request.get("content").or_else(|| request.get("prompt")) else {
        bail!("content: expected a string, but it is missing");
    };
    let Some(text) = text.as_str() else {
        bail!("content: expected a string, found {}", text.kind());
    };
    let is_plain = request.get("parse_special").and_then(Value::as_bool) == Some(false);
    Ok(tokenizer.encode(text, if is_plain { Special::Text } else { Special::Parse }))
}

fn detokenize(request: &Value, tokenizer: &Tokenizer) -> Result<String> {
    match request.get("tokens") {
        Some(Value::Array(ids)) if ids.is_empty() => Ok(String::new()),
        Some(ids @ Value::Array(_)) => {
            tokenizer.decode(&prompt_ids(ids, tokenizer).context(|| "tokens")?, false)
        }
        _ => bail!("tokens: expected an array of token ids"),
    }
}

impl Shared {
    fn check_key(&self, request: &Request) -> std::result::Result<(), Refusal> {
        let key = self.settings.api_key.as_ref();
        key.map_or(Ok(()), |key| http::check_key(request.header("authorization"), key))
    }

    /// Answers a request of a method that the route has.
    fn answer(
        &self,
        route: Route<'_>,
        engine: &Engine,
        request: &Request,
        responder: &mut Responder,
    ) -> Outcome {
        let tokenizer = engine.tokenizer().map_err(bad_request)?;
        let ctx_tokens = engine.options().ctx_tokens;
        let model = || model_object(&self.settings.model_id, ctx_tokens);
        match route {
            Route::Page => page::respond(responder),
            Route::Health => {
                let is_authorised = self.check_key(request).is_ok();
                respond(responder, self.health(engine, is_authorised))
            }
            Route::Metrics => {
                let metrics = self.metrics(engine);
                responder.respond(200, "text/plain; version=0.0.4", metrics.as_bytes())
            }
            Route::Experts => {
                let layers = engine.expert_view().layers().map(Value::String).collect();
                respond(responder, object(vec![("layers", Value::Array(layers))]))
            }
            Route::Models => {
                let list = ("data", Value::Array(vec![model()]));
                respond(responder, object(vec![("object", "list".into()), list]))
            }
            Route::Model(id) if id.join("/") == self.settings.model_id => {
                respond(responder, model())
            }
            Route::Model(id) => {
                let message = format!("no model {:?}; /v1/models has its name", id.join("/"));
                let refusal = Refusal::new(404, message).code("model_not_found");
                Err(refusal.param("model").into())
            }
            Route::Chat | Route::Completion => {
                let body = parse(request).map_err(bad_request)?;
                let is_chat = matches!(route, Route::Chat);
                let ask = Ask::read(&body, is_chat, engine)?;
                drop(body);
                let new_tokens = ask.fit(ctx_tokens)?;
                let Shared { queue, settings, .. } = self;
                answer::answer(ask, new_tokens, tokenizer, queue, settings, responder)
            }
            Route::Tokenize => {
                let found = parse(request).and_then(|body| tokenize(&body, tokenizer));
                let ids = found.map_err(bad_request)?;
                let tokens = ids.iter().map(|id| Value::Int((*id).into())).collect();
                let sizes = vec![("count", ids.len().into()), ("max_model_len", ctx_tokens.into())];
                let tokens = [("tokens", Value::Array(tokens))];
                respond(responder, object(tokens.into_iter().chain(sizes).collect()))
            }
            Route::Detokenize => {
                let found = parse(request).and_then(|body| detokenize(&body, tokenizer));
                let text: Value = found.map_err(bad_request)?.as_str().into();
                respond(responder, object(vec![("content", text.clone()), ("prompt", text)]))
            }
        }
    }

    fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That it lives, and for those who may know how it is.
    fn health(&self, engine: &Engine, is_authorised: bool) -> Value {
        let mut members = vec![("status", "ok".into())];
        if is_authorised {
            let (standing, settings) = (self.queue.standing(), &self.settings);
            let Progress { prefill: [tokens, done], tokens: told, drafts, .. } = self.progress();
            let experts = engine.expert_view().counters();
            let mut scheduler = vec![
                ("active", standing.active.into()),
                ("queued", standing.queued.into()),
                ("capacity", settings.kv_slots.into()),
                ("max_queue", settings.queue.into()),
                ("queue_timeout_seconds", Value::Float(settings.queue_time.as_secs_f64())),
            ];
            let counts = standing.counters.named();
            scheduler.extend(counts.map(|(name, count)| (name, (count as usize).into())));
            let prefill = vec![("tokens", tokens.into()), ("done", done.into())];
            let progress = vec![
                ("tokens", told.into()),
                ("drafts", drafts[0].into()),
                ("drafts_accepted", drafts[1].into()),
                ("expert_hits", (experts.hits as usize).into()),
                ("expert_misses", (experts.misses as usize).into()),
                ("read_bytes", (experts.bytes_read as usize).into()),
            ];
            members.extend([
                ("model", settings.model_id.as_str().into()),
                ("context_length", engine.options().ctx_tokens.into()),
                ("kv_slots", settings.kv_slots.into()),
                ("scheduler", object(scheduler)),
                ("prefill", object(prefill)),
                ("progress", object(progress)),
            ]);
        }
        object(members)
    }

    /// In the text format of Prometheus.
    fn metrics(&self, engine: &Engine) -> String {
        let (standing, totals) = (self.queue.standing(), self.progress().totals);
        let experts = engine.expert_view().counters();
        let mut text = String::from("# TYPE coli_requests_total counter\n");
        for (outcome, count) in standing.counters.named() {
            text += &format!("coli_requests_total{{outcome=\"{outcome}\"}} {count}\n");
        }
        let rows: [(&str, &str, f64); 14] = [
            ("requests_active", "gauge", standing.active as f64),
            ("requests_queued", "gauge", standing.queued as f64),
            ("prompt_tokens_total", "counter", totals.prompt[0] as f64),
            ("cached_tokens_total", "counter", totals.prompt[1] as f64),
            ("completion_tokens_total", "counter", totals.completion[0] as f64),
            ("reasoning_tokens_total", "counter", totals.completion[1] as f64),
            ("prefill_seconds_total", "counter", totals.seconds[0]),
            ("decode_seconds_total", "counter", totals.seconds[1]),
            ("drafts_total", "counter", totals.drafts[0] as f64),
            ("drafts_accepted_total", "counter", totals.drafts[1] as f64),
            ("expert_hits_total", "counter", experts.hits as f64),
            ("expert_misses_total", "counter", experts.misses as f64),
            ("read_bytes_total", "counter", experts.bytes_read as f64),
            ("peak_resident_bytes", "gauge", sys::peak_rss_bytes() as f64),
        ];
        for (name, kind, value) in rows {
            text += &format!("# TYPE coli_{name} {kind}\ncoli_{name} {value}\n");
        }
        text
    }
}
