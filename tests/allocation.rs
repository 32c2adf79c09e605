//! Decoding allocates nothing: a counting allocator watches single steps on every thread, and ten
//! thousand of them; and draws with every parameter in use.
//!
//! One test, because the counts are those of the whole process: the test harness allocates
//! whenever a test begins or ends.

mod common;

use colibri::cpu::Isa;
use colibri::engine::{Engine, Options, Session};
use colibri::model::Unobserved;
use colibri::plan::Limit;
use colibri::sample::{Params, Sampler, log_probabilities};
use common::{fixture, integers, open, read_json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering::SeqCst};

/// The system's allocator, watched.
struct Watched;

/// While set, every allocation counts and the first of them says where it was made.
static ARMED: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Bytes allocated and not freed.
static BALANCE_BYTES: AtomicI64 = AtomicI64::new(0);
static FIRST: Mutex<Option<Backtrace>> = Mutex::new(None);

thread_local! {
    /// This thread is taking a backtrace, which allocates.
    static TRACING: Cell<bool> = const { Cell::new(false) };
}

fn note_allocation() {
    if ARMED.load(SeqCst) && !TRACING.get() && COUNT.fetch_add(1, SeqCst) == 0 {
        TRACING.set(true);
        *FIRST.lock().unwrap() = Some(Backtrace::force_capture());
        TRACING.set(false);
    }
}

// SAFETY: every call goes to the system's allocator with the arguments it came with; what is done
// beside it touches no memory that was handed out, and its own allocations are not noted again.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_allocation();
        BALANCE_BYTES.fetch_add(layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note_allocation();
        BALANCE_BYTES.fetch_add(layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is the same. Without it
        // the caches of long contexts would be written to be zeroed.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        note_allocation();
        BALANCE_BYTES.fetch_add(new_bytes as i64 - layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps the contract of `realloc`, which is the same; all memory came
        // from the system's allocator.
        unsafe { System.realloc(old, layout, new_bytes) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        BALANCE_BYTES.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same; all memory came
        // from the system's allocator.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Fails if `work` allocates on any thread, or leaves more or less memory in use.
#[track_caller]
fn assert_no_allocation(case: &str, work: impl FnOnce()) {
    let balance_bytes = BALANCE_BYTES.load(SeqCst);
    COUNT.store(0, SeqCst);
    ARMED.store(true, SeqCst);
    work();
    ARMED.store(false, SeqCst);
    let count = COUNT.load(SeqCst);
    if let Some(first) = FIRST.lock().unwrap().take() {
        panic!("{case}: {count} allocations, the first of them here:\n{first}");
    }
    let grown_bytes = BALANCE_BYTES.load(SeqCst) - balance_bytes;
    assert_eq!((count, grown_bytes), (0, 0), "{case}: allocations, and bytes more in use");
}

fn engine(name: &str, threads: usize, isa: Isa, ctx_tokens: usize) -> Engine {
    let limit = Limit::SlotsPerLayer(1000);
    open(
        &fixture(name),
        Options { ctx_tokens, chunk_rows: 16, limit, threads, isa, ..Options::default() },
    )
}

fn advance(session: &mut Session<'_>, tokens: &[u32]) {
    session.advance(tokens, &mut Unobserved).unwrap();
}

/// Brings the experts into memory that the tokens of the vocabulary choose on timelines of two.
fn load_experts(engine: &Engine) {
    let vocab = engine.config().vocab_size as u32;
    let mut session = engine.session().unwrap();
    for token in 0..vocab {
        advance(&mut session, &[token, token * 5 % vocab]);
    }
}

/// Decodes `tokens` one by one on a new session. Steps whose length `is_counted` must not allocate.
fn decode(case: &str, engine: &Engine, tokens: &[u32], is_counted: impl Fn(usize) -> bool) {
    load_experts(engine);
    let mut session = engine.session().unwrap();
    for end in 1..=tokens.len() {
        let misses = engine.expert_counters().misses;
        if is_counted(end) {
            assert_no_allocation(&format!("{case}, token {end}"), || {
                advance(&mut session, &tokens[..end]);
            });
            assert_eq!(engine.expert_counters().misses, misses, "{case}, token {end}: misses");
        } else {
            advance(&mut session, &tokens[..end]);
        }
    }
}

/// Below index_topk and beyond it. The first steps make the buffers, those behind index_topk the
/// indexer's.
fn steps() {
    let isa = Isa::detect();
    for (name, threads, isa) in ["a_seed", "b_dsa_full", "formats/mixed"]
        .into_iter()
        .flat_map(|name| [(name, 1, Isa::Scalar), (name, 1, isa), (name, 2, isa)])
    {
        let reference = read_json(&fixture(name).join("ref.json"));
        let tokens = integers(reference.get("full_ids").unwrap());
        let engine = engine(name, threads, isa, tokens.len());
        let topk = engine.config().index_topk;
        let case = format!("{name}, {threads} threads, {isa}");
        decode(&case, &engine, &tokens, |end| (4..=topk).contains(&end) || end > topk + 3);
    }
}

/// Ten thousand tokens, hundreds of times index_topk.
fn long_decode() {
    let start = std::time::Instant::now();
    let engine = engine("formats/mixed", 1, Isa::detect(), 10_100);
    let vocab = engine.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..10_000u32).map(|i| (i * i + i / 7) % vocab).collect();
    decode("formats/mixed", &engine, &tokens, |end| end > 40);
    println!("{} tokens in {:.1} s", tokens.len(), start.elapsed().as_secs_f64());
}

/// The first draw of each kind makes the buffers.
fn draws() {
    let logits: Vec<f32> = (0..5000).map(|i| (i * 37 % 101) as f32 * 0.1).collect();
    let tokens: Vec<u32> = (0..500).map(|i| i * i % 4999).collect();
    let params = Params {
        temperature: 1.0,
        top_p: 0.95,
        repetition_penalty: 1.1,
        presence_penalty: 0.5,
        frequency_penalty: 0.5,
        logit_bias: vec![(7, 2.0)],
        ..Params::GREEDY
    };
    let (mut sampler, allowed) = (Sampler::new(params, 5000, vec![3]).unwrap(), [!0; 79]);
    let mut top = Vec::new();
    let mut draw = |position: usize| {
        sampler.sample(&logits, &tokens[..position], Some(&allowed)).unwrap();
        log_probabilities(&logits, 5, 20, &mut top).unwrap();
    };
    draw(0);
    assert_no_allocation("draws", || (1..500).for_each(draw));
}

#[test]
fn decoding_allocates_nothing_however_long_it_goes_on() {
    draws();
    steps();
    long_decode();
}
