//! The style of the code base, as a test: sizes, layering, and where `unsafe` may stand.

use std::path::{Path, PathBuf};

const LINE_COLUMNS_MAX: usize = 100;
const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;

/// Modules by layer; a file imports from its own layer and the ones before it.
const LAYERS: [&[&str]; 8] = [
    &["error", "sys", "memory", "json", "unicode", "cpu", "pool"],
    &["float", "quant", "safetensors", "tokenizer"],
    &["kernels", "config"],
    &["weights", "disk", "experts", "plan", "convert"],
    &["ops", "kv", "attention", "indexer", "moe", "model"],
    &["grammar", "sample", "stop", "draft", "state", "engine", "chat", "reply"],
    &["http", "api", "server"],
    &["cli"],
];

/// Files that may say `unsafe`.
const UNSAFE_ALLOWED: [&str; 4] =
    ["src/sys.rs", "src/pool.rs", "src/kernels/avx2.rs", "src/kernels/avx512.rs"];
/// Denies `unsafe` instead of forbidding it, because the files below it could not allow it then.
const UNSAFE_DENIED: &str = "src/kernels/mod.rs";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below `dir`, with its path relative to the root and its text.
fn rust_files(dir: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&root().join(dir), &mut files);
    files.sort();
    let relative = |path: &Path| path.strip_prefix(root()).unwrap().display().to_string();
    files.iter().map(|path| (relative(path), std::fs::read_to_string(path).unwrap())).collect()
}

/// Fails with every finding at once.
fn report(findings: Vec<String>) {
    assert!(findings.is_empty(), "\n{}", findings.join("\n"));
}

/// Generated tables are exempt from sizes.
fn is_generated(path: &str) -> bool {
    path == "src/unicode.rs"
}

#[test]
fn lines_and_files_are_short() {
    let mut findings = Vec::new();
    for (path, text) in rust_files("src").into_iter().chain(rust_files("tests")) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX && !is_generated(&path) {
            findings.push(format!("{path}: {lines} lines"));
        }
        for (i, line) in text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > LINE_COLUMNS_MAX {
                findings.push(format!("{path}:{}: {columns} columns", i + 1));
            }
            if line.ends_with(' ') || line.contains('\t') {
                findings.push(format!("{path}:{}: trailing space or tab", i + 1));
            }
        }
    }
    report(findings);
}

/// rustfmt puts a function's closing brace at the indentation of its `fn`.
#[test]
fn functions_are_short() {
    let mut findings = Vec::new();
    for (path, text) in rust_files("src").into_iter().chain(rust_files("tests")) {
        let mut open: Vec<(usize, usize)> = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let code = line.trim_start();
            let indent = line.len() - code.len();
            let is_function = [
                "fn ",
                "pub fn ",
                "const fn ",
                "pub const fn ",
                "pub(super) fn ",
                "pub(crate) fn ",
            ]
            .iter()
            .any(|start| code.starts_with(start));
            if is_function && !code.ends_with(';') && !code.ends_with('}') {
                open.push((indent, i));
            }
            if (code == "}" || code == "};")
                && let Some((_, start)) = open.pop_if(|(function, _)| *function == indent)
                && i - start + 1 > FUNCTION_LINES_MAX
            {
                findings.push(format!(
                    "{path}:{}: a function of {} lines",
                    start + 1,
                    i - start + 1
                ));
            }
        }
    }
    report(findings);
}

#[test]
fn every_file_opens_with_what_it_owns_and_forbids_unsafe() {
    let mut findings = Vec::new();
    for (path, text) in rust_files("src") {
        if !text.starts_with("//! ") {
            findings.push(format!("{path}: does not open with a //! paragraph"));
        }
        let may_be_unsafe = UNSAFE_ALLOWED.contains(&path.as_str());
        let is_crate_or_test =
            ["src/lib.rs", "src/main.rs"].contains(&path.as_str()) || path.ends_with("/tests.rs");
        let level = if path == UNSAFE_DENIED { "deny" } else { "forbid" };
        let attribute = format!("#![{level}(unsafe_code)]");
        if !may_be_unsafe && !is_crate_or_test && !text.contains(&attribute) {
            findings.push(format!("{path}: lacks {attribute}"));
        }
        if !may_be_unsafe && text.lines().any(|line| line.contains("unsafe {")) {
            findings.push(format!("{path}: unsafe is not allowed here"));
        }
    }
    report(findings);
}

#[test]
fn every_unsafe_block_says_why_it_is_safe() {
    let mut findings = Vec::new();
    for path in UNSAFE_ALLOWED {
        let text = std::fs::read_to_string(root().join(path)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let block = line.contains("unsafe {") || line.contains("unsafe fn ");
            let above = lines[..i].iter().rev().take_while(|line| line.trim().starts_with("//"));
            if block && !above.into_iter().any(|line| line.contains("SAFETY:")) {
                findings.push(format!("{path}:{}: no SAFETY line", i + 1));
            }
        }
    }
    report(findings);
}

#[test]
fn imports_go_down_only() {
    let layer_of = |module: &str| LAYERS.iter().position(|layer| layer.contains(&module));
    let mut findings = Vec::new();
    for (path, text) in rust_files("src") {
        let module = path.trim_start_matches("src/").split(['/', '.']).next().unwrap();
        if ["lib", "main"].contains(&module) {
            continue;
        }
        let Some(layer) = layer_of(module) else {
            findings.push(format!("{path}: module {module} has no layer in tests/tidy.rs"));
            continue;
        };
        // Unit tests may look at anything.
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for part in code.split("crate::").skip(1) {
            let used: String =
                part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if layer_of(&used).is_some_and(|used_layer| used_layer > layer) {
                findings.push(format!("{path}: layer {layer} uses crate::{used}"));
            }
        }
    }
    report(findings);
}

#[test]
fn nothing_is_left_over_and_nothing_is_personal() {
    let marks =
        [["TO", "DO"], ["FIX", "ME"], ["to", "do!("], ["unimple", "mented!("], ["db", "g!("]];
    let mut findings = Vec::new();
    for (path, text) in rust_files("src").into_iter().chain(rust_files("tests")) {
        for mark in marks.map(|parts| parts.concat()) {
            if text.contains(&mark) {
                findings.push(format!("{path}: contains {mark}"));
            }
        }
    }
    report(findings);
}

#[test]
fn the_package_has_no_dependency_and_only_known_top_level_entries() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = format!("version = \"{}\"", colibri::VERSION);
    assert!(manifest.lines().any(|line| line == version), "Cargo.toml lacks {version}");
    let mut section = "";
    let mut findings = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.contains("dependencies") && !line.trim().is_empty() {
            findings.push(format!("Cargo.toml: {section} {line}"));
        }
    }
    let known = [
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "tests",
        "oracle",
        "README.md",
        "LICENSE",
        ".ci",
        ".gitignore",
        ".git",
        "rustfmt.toml",
        "target",
        "build",
    ];
    for entry in std::fs::read_dir(root()).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        if !known.contains(&name.as_str()) {
            findings.push(format!("unexpected at the top level: {name}"));
        }
    }
    report(findings);
}
