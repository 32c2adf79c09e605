//! A server in the test's own process, a client over a raw socket, and a model that says what it
//! is told to.

#![allow(dead_code, reason = "each test binary uses a part of this file")]

use super::{TempDir, open, read_safetensors, write_safetensors};
use colibri::engine::{Engine, Options};
use colibri::http;
use colibri::json::{self, Value};
use colibri::server::{self, Settings};
use colibri::tokenizer::{Special, Tokenizer};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest wait for anything that must come; a test that reaches it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The small model.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("oracle/demo")
}

/// A server on a free port that ends with the test.
pub struct Running {
    address: SocketAddr,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
}

pub fn settings() -> Settings {
    Settings {
        model_id: "demo".into(),
        api_key: None,
        allowed_hosts: Vec::new(),
        cors_origins: Vec::new(),
        kv_slots: 1,
        sessions: None,
        queue: 8,
        queue_time: PATIENCE,
        keepalive_time: PATIENCE,
        log: |_| {},
    }
}

pub fn options() -> Options {
    Options { ctx_tokens: 512, threads: 1, ..Options::default() }
}

impl Running {
    pub fn new(dir: &Path, settings: Settings, options: Options) -> Running {
        let engine = open(dir, options);
        let running = Running::loading(settings, || Ok(Arc::new(engine)));
        while running.get("/health").status == 503 {
            thread::sleep(Duration::from_millis(1));
        }
        running
    }

    /// Serves once `load` is done.
    pub fn loading(
        settings: Settings,
        load: impl FnOnce() -> colibri::error::Result<Arc<Engine>> + Send + 'static,
    ) -> Running {
        let address = "127.0.0.1:0".parse().unwrap();
        let listener = http::Server::bind(address, http::Limits::default()).unwrap();
        let address = listener.address();
        let is_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_ended);
        let serve = move || server::run(listener, settings, load, || ended.load(Relaxed));
        let thread = Some(thread::spawn(move || serve().unwrap()));
        Running { address, is_ended, thread }
    }

    /// The small model with the usual settings.
    pub fn demo() -> Running {
        Running::new(&demo(), settings(), options())
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request whose answer is not read yet.
    pub fn send(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(post(path, body, "").as_bytes()).unwrap();
        stream
    }

    pub fn talk(&self, request: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        Answer::read(&mut stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.talk(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    pub fn post(&self, path: &str, body: &str) -> Answer {
        self.talk(&post(path, body, ""))
    }

    pub fn chat(&self, fields: &str) -> Value {
        self.post("/v1/chat/completions", &chat(fields)).ok()
    }

    /// Waits until the health object has `value` at `path`.
    pub fn wait_for(&self, path: &str, is_there: impl Fn(i64) -> bool) {
        let start = Instant::now();
        loop {
            let health = self.get("/health").ok();
            if is_there(at(&health, path).as_i64().unwrap()) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{path}: {}", json::to_compact(&health));
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn counter(&self, name: &str) -> i64 {
        at(&self.get("/health").ok(), &format!("scheduler.{name}")).as_i64().unwrap()
    }

    /// Ends the server; how many requests it cut off.
    pub fn stop(mut self) -> usize {
        self.is_ended.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.is_ended.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn post(path: &str, body: &str, headers: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A greedy request without thinking; `fields` come first, so that a test can see them refused.
pub fn chat(fields: &str) -> String {
    let separator = if fields.is_empty() { "" } else { "," };
    let has = |name: &str| fields.contains(&format!("\"{name}\""));
    let mut body = format!("{{{fields}{separator}");
    for (name, value) in [
        ("messages", r#"[{"role":"user","content":"What is the weather?"}]"#),
        ("temperature", "0"),
        ("enable_thinking", "false"),
        ("max_tokens", "16"),
    ] {
        if !has(name) {
            body += &format!("\"{name}\":{value},");
        }
    }
    body.pop();
    body + "}"
}

/// An answer, its chunks put together.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn read(stream: &mut TcpStream) -> Answer {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        Answer::parse(&String::from_utf8(bytes).unwrap())
    }

    pub fn parse(text: &str) -> Answer {
        let (head, mut rest) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
        let mut body = String::new();
        if head.contains("Transfer-Encoding: chunked") {
            loop {
                let (size, after) = rest.split_once("\r\n").expect("a stream that is cut off");
                let size = usize::from_str_radix(size, 16).unwrap();
                body += &after[..size];
                rest = &after[size + 2..];
                if size == 0 {
                    break;
                }
            }
        } else {
            body += rest;
        }
        Answer { status: head[9..12].parse().unwrap(), head: head.into(), body }
    }

    pub fn json(&self) -> Value {
        let parsed = json::parse(self.body.as_bytes(), json::Limits::default());
        parsed.unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// Status, code and field of an error object; fails if it is not exactly that.
    pub fn error(&self) -> (u16, String, String) {
        let body = self.json();
        let error = at(&body, "error");
        let keys: Vec<&str> = error.as_object().unwrap().iter().map(|(k, _)| k.as_str()).collect();
        assert_eq!(keys, ["message", "type", "param", "code"], "{}", self.body);
        assert!(!text_at(&body, "error.message").is_empty());
        let word = |name: &str| error.get(name).unwrap().as_str().unwrap_or("null").to_string();
        (self.status, word("code"), word("param"))
    }

    /// The objects of a stream that ends as it must.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert!(self.head.contains("Content-Type: text/event-stream"), "{}", self.head);
        let blocks = self.body.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        let mut data: Vec<&str> = blocks.map(|b| b.strip_prefix("data: ").unwrap()).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.iter().map(|d| json::parse(d.as_bytes(), json::Limits::default()).unwrap()).collect()
    }
}

/// What lies at `a.0.b`.
pub fn at<'a>(value: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(value, |value, key| {
        let found = match key.parse::<usize>() {
            Ok(index) => value.as_array().and_then(|items| items.get(index)),
            Err(_) => value.get(key),
        };
        found.unwrap_or_else(|| panic!("no {path} in {}", json::to_compact(value)))
    })
}

pub fn text_at<'a>(value: &'a Value, path: &str) -> &'a str {
    at(value, path).as_str().unwrap_or_else(|| panic!("{path}: {}", json::to_compact(value)))
}

pub fn int_at(value: &Value, path: &str) -> i64 {
    at(value, path).as_i64().unwrap()
}

/// The texts of all deltas of one kind.
pub fn streamed(events: &[Value], kind: &str) -> String {
    let deltas = events.iter().filter_map(|event| event.get("choices")?.as_array()?.first());
    deltas.filter_map(|choice| choice.get("delta")?.get(kind)?.as_str()).collect()
}

/// A model that says one thing, whatever it is asked: behind each token of the script comes the
/// next, and none is in it twice. With thinking off it starts behind `</think>`.
pub fn scripted(name: &str, script: &str) -> TempDir {
    let tokenizer = Tokenizer::load(&demo().join("tokenizer.json")).unwrap();
    scripted_ids(name, &tokenizer.encode(script, Special::Parse), None)
}

/// The same for tokens; behind one of them the model knows nothing but NaN.
pub fn scripted_ids(name: &str, ids: &[u32], broken: Option<u32>) -> TempDir {
    let dir = TempDir::with_fixture(name, "a_seed");
    let config = std::fs::read_to_string(dir.0.join("config.json")).unwrap();
    let config = config.replace("\"vocab_size\": 256", "\"vocab_size\": 3072");
    let config = config.replace("\"eos_token_id\": 1", "\"eos_token_id\": 3036");
    std::fs::write(dir.0.join("config.json"), config).unwrap();
    std::fs::copy(demo().join("tokenizer.json"), dir.0.join("tokenizer.json")).unwrap();
    let path = dir.0.join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    let matrix = |ones: Vec<(usize, usize)>| {
        let mut floats = vec![0f32; 3072 * 128];
        ones.iter().for_each(|(row, column)| floats[row * 128 + column] = 1.0);
        floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<u8>>()
    };
    let place = |id: u32| ids.iter().position(|other| *other == id).unwrap_or(127);
    for tensor in &mut tensors {
        match tensor.name.as_str() {
            // What the layers add is nothing.
            name if name.contains("o_proj") || name.contains("down_proj") => tensor.bytes.fill(0),
            "model.embed_tokens.weight" => {
                tensor.shape = vec![3072, 128];
                tensor.bytes = matrix((0..3072).map(|id| (id, place(id as u32))).collect());
                if let Some(id) = broken {
                    let row = &mut tensor.bytes[id as usize * 512..][..512];
                    row.copy_from_slice(&f32::NAN.to_le_bytes().repeat(128));
                }
            }
            "lm_head.weight" => {
                tensor.shape = vec![3072, 128];
                let next = ids.windows(2).map(|pair| (pair[1] as usize, place(pair[0])));
                tensor.bytes = matrix(next.chain([(3036, 127)]).collect());
            }
            "model.norm.weight" => {
                tensor.bytes = 1f32.to_le_bytes().repeat(128);
            }
            _ => {}
        }
    }
    assert!((0..ids.len()).all(|i| place(ids[i]) == i), "{name}: a token is there twice");
    write_safetensors(&path, &tensors);
    dir
}
