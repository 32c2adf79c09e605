//! `colibri`: runs GLM-5.2 (`glm_moe_dsa`) on a machine with about 25 GB of RAM.
//!
//! Modules are listed in layers; a module imports only from its own layer or from those above it
//! in this list. The README says in which order to read them.

#![deny(unsafe_op_in_unsafe_fn)]

/// Version of the program, as in Cargo.toml (a build with plain `rustc` has no other source).
pub const VERSION: &str = "0.1.0";

// Layer 0, base: errors, operating system, memory, processor, threads, text.
pub mod cpu;
pub mod error;
pub mod json;
pub mod memory;
pub mod pool;
pub mod sys;
pub mod unicode;

// Layer 1, formats: bytes to values.
pub mod float;
pub mod quant;
pub mod safetensors;
pub mod tokenizer;

// Layer 2, arithmetic and shape.
pub mod config;
pub mod kernels;

// Layer 3, storage: names to weights, reads, the expert store, the memory plan, conversion.
pub mod convert;
pub mod disk;
pub mod experts;
pub mod plan;
pub mod weights;

// Layer 4, model: the forward pass.
pub mod attention;
pub mod indexer;
pub mod kv;
pub mod model;
pub mod moe;
pub mod ops;

// Layer 5, engine: text in, text out.
pub mod chat;
pub mod draft;
pub mod engine;
pub mod grammar;
pub mod reply;
pub mod sample;
pub mod state;
pub mod stop;

// Layer 6, service: framing, the shapes of the API, and what answers them.
pub mod api;
pub mod http;
pub mod server;

// Layer 7, top: arguments, one file per verb.
pub mod cli;
