//! `colibri`: runs GLM-5.2 (`glm_moe_dsa`) on a machine with about 25 GB of RAM.
//!
//! Modules are listed in layers; a module imports only from its own layer or from those above it
//! in this list. To audit the inference path, read them in this order.

// Layer 0, base: errors, operating system, text.
pub mod error;
pub mod json;

// Layer 1, formats: bytes to values.
pub mod float;
pub mod quant;

// Layer 2, arithmetic and shape.
pub mod kernels;
