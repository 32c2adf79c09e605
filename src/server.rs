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
use crate::engine::Engine;
use crate::error::{Context, Result};
use crate::http::{self, Handler, Outcome, Refusal, Request, Responder};
use crate::json::{self, Field, Value, to_compact};
use crate::object;
use crate::plan::gb;
use crate::sys;
use crate::tokenizer::Special;
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
                 kv-slots {kv_slots}, {} · queue {} · {} a key",
                shared.settings.model_id,
                engine.options().ctx_tokens,
                gb(engine.kv_bytes()),
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
struct Route {
    /// Without slashes at its ends, and without `v1/`, which may stand before any.
    path: &'static str,
    /// Methods that it has, beside OPTIONS.
    methods: &'static str,
    /// Whether it answers without a key.
    is_public: bool,
    answer: fn(&Shared, &Engine, &Request, &mut Responder) -> Outcome,
}

const READ: &str = "GET, HEAD";
const ROUTES: [Route; 10] = [
    Route { path: "", methods: READ, is_public: true, answer: |_, _, _, r| page::respond(r) },
    Route { path: "health", methods: READ, is_public: true, answer: Shared::health },
    Route { path: "experts", methods: READ, is_public: false, answer: Shared::experts },
    Route { path: "metrics", methods: READ, is_public: false, answer: Shared::metrics },
    Route { path: "models", methods: READ, is_public: false, answer: Shared::models },
    Route { path: MODEL, methods: READ, is_public: false, answer: Shared::model },
    Route { path: CHAT, methods: "POST", is_public: false, answer: Shared::reply },
    Route { path: "completions", methods: "POST", is_public: false, answer: Shared::reply },
    Route { path: "tokenize", methods: "POST", is_public: false, answer: Shared::tokenize },
    Route { path: "detokenize", methods: "POST", is_public: false, answer: Shared::detokenize },
];
/// The path of one model, in front of its name, which may have slashes.
const MODEL: &str = "models/";
const CHAT: &str = "chat/completions";

/// The path that [`Route::path`] has.
fn plain_path(request: &Request) -> String {
    match &request.segments[..] {
        [first, rest @ ..] if first == "v1" => rest.join("/"),
        all => all.join("/"),
    }
}

impl Route {
    fn find(request: &Request) -> Option<&'static Route> {
        let path = plain_path(request);
        let leads =
            |route: &&Route| route.path == path || (route.path == MODEL && path.starts_with(MODEL));
        ROUTES.iter().find(leads)
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
        let is_public = Route::find(request).is_some_and(|route| route.is_public);
        if request.method != "OPTIONS" && !is_public {
            self.0.check_key(request)?;
        }
        Ok(())
    }

    fn handle(&self, request: &Request, responder: &mut Responder) -> Outcome {
        if request.method == "OPTIONS" {
            return responder.respond(204, "", b"");
        }
        let Some(route) = Route::find(request) else {
            return Err(Refusal::new(404, format!("no route {:?}", request.path)).into());
        };
        let methods = route.methods;
        if !methods.split(", ").any(|method| method == request.method) {
            let message = format!("{} is offered for {:?}", methods, request.path);
            return Err(Refusal::new(405, message).header("Allow", methods).into());
        }
        match self.0.engine.get() {
            Some(engine) => (route.answer)(&self.0, engine, request, responder),
            // It waits for the model, too.
            None if route.path.is_empty() => page::respond(responder),
            None => {
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

impl Shared {
    fn check_key(&self, request: &Request) -> std::result::Result<(), Refusal> {
        let key = self.settings.api_key.as_ref();
        key.map_or(Ok(()), |key| http::check_key(request.header("authorization"), key))
    }

    fn experts(&self, engine: &Engine, _: &Request, responder: &mut Responder) -> Outcome {
        let layers: Vec<String> = engine.expert_view().layers().collect();
        respond(responder, object! { "layers": layers })
    }

    fn models(&self, engine: &Engine, _: &Request, responder: &mut Responder) -> Outcome {
        let model = model_object(&self.settings.model_id, engine.options().ctx_tokens);
        respond(responder, object! { "object": "list", "data": vec![model] })
    }

    fn model(&self, engine: &Engine, request: &Request, responder: &mut Responder) -> Outcome {
        let path = plain_path(request);
        let (asked, id) = (&path[MODEL.len()..], &self.settings.model_id);
        if asked == id {
            return respond(responder, model_object(id, engine.options().ctx_tokens));
        }
        let message = format!("no model {asked:?}; /v1/models has its name");
        Err(Refusal::new(404, message).code("model_not_found").param("model").into())
    }

    /// Of a chat or a completion.
    fn reply(&self, engine: &Engine, request: &Request, responder: &mut Responder) -> Outcome {
        let tokenizer = engine.tokenizer().map_err(bad_request)?;
        let body = parse(request).map_err(bad_request)?;
        let ask = Ask::read(&body, plain_path(request) == CHAT, engine)?;
        drop(body);
        let new_tokens = ask.fit(engine.options().ctx_tokens)?;
        let Shared { queue, settings, .. } = self;
        answer::answer(ask, new_tokens, tokenizer, queue, settings, responder)
    }

    /// The tokens of `messages` as they would be fed, or of the text `content` or `prompt`, in
    /// which markers count unless `parse_special` is false.
    fn tokenize(&self, engine: &Engine, request: &Request, responder: &mut Responder) -> Outcome {
        let tokens = || -> Result<Vec<u32>> {
            let (body, tokenizer) = (parse(request)?, engine.tokenizer()?);
            if body.get("messages").is_some() {
                return render(&body)?.ids(tokenizer);
            }
            let body = Field::root(&body);
            let text = body.get("prompt").or(body.get("content")).required_string()?;
            let special = match body.get("parse_special").boolean()? {
                Some(false) => Special::Text,
                _ => Special::Parse,
            };
            Ok(tokenizer.encode(text, special))
        };
        let (ids, most) = (tokens().map_err(bad_request)?, engine.options().ctx_tokens);
        let count = ids.len();
        respond(responder, object! { "tokens": ids, "count": count, "max_model_len": most })
    }

    fn detokenize(&self, engine: &Engine, request: &Request, responder: &mut Responder) -> Outcome {
        let text = || -> Result<String> {
            let (body, tokenizer) = (parse(request)?, engine.tokenizer()?);
            let tokens = Field::root(&body).get("tokens");
            match tokens.value() {
                Some(Value::Array(ids)) if ids.is_empty() => Ok(String::new()),
                Some(Value::Array(_)) => tokenizer.decode(&prompt_ids(&tokens, tokenizer)?, false),
                _ => Err(tokens.unexpected("an array of token ids")),
            }
        };
        let text = text().map_err(bad_request)?;
        respond(responder, object! { "content": text.as_str(), "prompt": text.as_str() })
    }

    fn progress(&self) -> Progress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That it lives, and for those who may know how it is.
    fn health(&self, engine: &Engine, request: &Request, responder: &mut Responder) -> Outcome {
        if self.check_key(request).is_err() {
            return respond(responder, object! { "status": "ok" });
        }
        let (standing, settings) = (self.queue.standing(), &self.settings);
        let Progress { prefill: [tokens, done], tokens: told, drafts, .. } = self.progress();
        let experts = engine.expert_view().counters();
        let counts = standing.counters.named().map(|(name, count)| (name.into(), count.into()));
        let scheduler = object! {
            "active": standing.active,
            "queued": standing.queued,
            "capacity": settings.kv_slots,
            "max_queue": settings.queue,
            "queue_timeout_seconds": settings.queue_time.as_secs_f64(),
        };
        let scheduler = scheduler.as_object().unwrap_or_default().iter().cloned();
        let health = object! {
            "status": "ok",
            "model": settings.model_id.as_str(),
            "context_length": engine.options().ctx_tokens,
            "kv_slots": settings.kv_slots,
            "scheduler": Value::Object(scheduler.chain(counts).collect()),
            "prefill": object! { "tokens": tokens, "done": done },
            "progress": object! {
                "tokens": told,
                "drafts": drafts[0],
                "drafts_accepted": drafts[1],
                "expert_hits": experts.hits,
                "expert_misses": experts.misses,
                "read_bytes": experts.bytes_read,
            },
        };
        respond(responder, health)
    }

    /// In the text format of Prometheus.
    fn metrics(&self, engine: &Engine, _: &Request, responder: &mut Responder) -> Outcome {
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
        responder.respond(200, "text/plain; version=0.0.4", text.as_bytes())
    }
}
