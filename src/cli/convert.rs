//! `coli convert`: a published checkpoint to the container that the engine runs from.
//!
//! The plan is printed before any work, and `--dry-run` ends there. What was begun is gone on with
//! by the same command.

#![forbid(unsafe_code)]

use super::info::draft_head_warning;
use super::load::{Bar, usage};
use super::{Args, Flag, Verb, note, print_text};
use crate::bail;
use crate::config::Config;
use crate::convert::{
    self, Calibration, Class, DEFAULT_BASE_URL, DIR_NAME, Event, Formats, Plan, Repo, Request,
    Scales, Speed, Totals, parse_format,
};
use crate::cpu;
use crate::error::{Error, Result};
use crate::plan::gb;
use crate::sys;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The verb's table entry.
pub const VERB: Verb = Verb {
    name: "convert",
    positional: "",
    summary: "make a container out of a published checkpoint",
    example: "coli convert --from /models/GLM-5.2-FP8 --to /models/glm-5.2 --dry-run",
    flags: &[&[
        Flag::value("--from", "DIR", "checkpoint: BF16, F16, F32, FP8 or NVFP4 safetensors"),
        Flag::value(REPO, "NAME", "checkpoint to fetch shard by shard instead, as OWNER/NAME"),
        Flag::value(BASE_URL, "URL", "server that --repo fetches from").or_env("HF_ENDPOINT"),
        Flag::value("--to", "DIR", "container; what was begun there is gone on with"),
        Flag::value(EXPERTS, "FORMAT", "routed experts (default int4-g64)"),
        Flag::value("--attention", "FORMAT", "q and kv projections (default int8)"),
        Flag::value("--o-proj", "FORMAT", "output of attention (default as --attention)"),
        Flag::value("--kv-b", "FORMAT", "latent to keys and values (default as --attention)"),
        Flag::value("--dense", "FORMAT", "MLP of layers without experts (default int8)"),
        Flag::value("--shared", "FORMAT", "shared experts (default int8)"),
        Flag::value("--io", "FORMAT", "embedding and head (default int8)"),
        Flag::value(INDEXER, "FORMAT", "sparse-attention indexers (default int8), or off"),
        Flag::value(MTP, "FORMAT", "draft head (default int8), or off"),
        Flag::value("--mtp-experts", "FORMAT", "its routed experts (default as --mtp)"),
        Flag::value(SCALES, "RULE", "abs-max, or search: least squared error (default abs-max)"),
        Flag::value(CALIBRATION, "FILE", "what score --calibrate wrote: weighs a search"),
        Flag::value("--keep-free", "GB", "room that stays free on the drive (default 10)"),
        Flag::switch("--delete-source", "delete each shard once all made of it is verified"),
        Flag::switch("--dry-run", "print the plan and stop"),
        Flag::value("--threads", "N", "threads that encode (default: cores that we may use)"),
    ]],
    run,
};

const EXPERTS: &str = "--experts";
const INDEXER: &str = "--indexer";
const MTP: &str = "--mtp";
const REPO: &str = "--repo";
const BASE_URL: &str = "--base-url";
const SCALES: &str = "--scales";
const CALIBRATION: &str = "--calibration";

/// Gigabytes that are kept free unless told otherwise.
const KEEP_FREE_GB: f64 = 10.0;

fn run(args: &Args) -> Result<()> {
    let mut request = request(args)?;
    if let Some(repo) = &request.repo {
        let mut bar = Bar::new("fetching headers");
        repo.prepare(&request, |done, all| bar.show(done, all, || format!("{done} of {all}")))?;
    }
    if let Some(path) = args.get(CALIBRATION) {
        let config = Config::load(&request.from)?;
        request.calibration = Some(Arc::new(Calibration::read(Path::new(path), &config)?));
    }
    let plan = Plan::new(&request)?;
    let free = free_bytes(&request.to);
    print_text(&(describe(&plan, &request, free) + &outlook(&plan, &request)?))?;
    if args.has("--dry-run") {
        return Ok(());
    }
    check_room(&plan, &request, free)?;
    sys::catch_interrupts();
    carry_out(plan, &request)
}

/// What there is to do, and how long it may take.
fn outlook(plan: &Plan, request: &Request) -> Result<String> {
    let (fetch_bytes, held_bytes) = plan.fetches(request);
    Ok(match request.repo {
        _ if plan.outputs.is_empty() => "nothing is left to do\n".into(),
        Some(_) => format!(
            "{} to fetch, {} of it here at a time\n",
            gb(fetch_bytes as usize),
            gb(held_bytes as usize)
        ),
        None => estimate(plan, request)?,
    })
}

/// Refuses to begin what will not fit the drive.
fn check_room(plan: &Plan, request: &Request, free: Option<u64>) -> Result<()> {
    let needed = plan.bytes_out().saturating_add(request.keep_free_bytes);
    let must_fit = plan.bytes_out() > 0 && !request.delete_source;
    if let Some(free) = free.filter(|free| must_fit && *free < needed) {
        bail!(
            "{}: {} free, {} are needed with what --keep-free keeps (--delete-source makes room as \
             it goes)",
            request.to.display(),
            gb(free as usize),
            gb(needed as usize)
        );
    }
    Ok(())
}

/// Converts, with progress on stderr.
fn carry_out(plan: Plan, request: &Request) -> Result<()> {
    let (bytes_in, bytes_out) = (plan.bytes_in(), plan.bytes_out());
    let fetch_bytes = plan.fetches(request).0;
    let (start, mut bar) = (Instant::now(), Bar::new("converting"));
    let (mut fetching, mut fetched_bytes) = (Bar::new("fetching"), 0);
    let (mut done_bytes, mut files) = (0, 0);
    convert::run(plan, request, |event| match event {
        Event::Fetched(bytes) => {
            fetched_bytes += bytes;
            let text = || progress(fetched_bytes as usize, fetch_bytes, start);
            fetching.show(fetched_bytes as usize, fetch_bytes as usize, text);
        }
        Event::Done(bytes) => {
            done_bytes += bytes as usize;
            fetching.clear();
            bar.show(done_bytes, bytes_in as usize, || progress(done_bytes, bytes_in, start));
        }
        Event::Finished(record) => {
            files += 1;
            bar.clear();
            let at = progress(done_bytes, bytes_in, start);
            note(&format!("coli: {}: {}; {at}\n", record.name, gb(record.bytes as usize)));
        }
        Event::Deleted(path) => {
            bar.clear();
            note(&format!("coli: {}: deleted\n", path.display()));
        }
    })?;
    if files == 0 {
        return Ok(());
    }
    let seconds = start.elapsed().as_secs_f64();
    print_text(&format!(
        "{files} files, {} out of {} in {seconds:.1} s\n",
        gb(bytes_out as usize),
        gb(bytes_in as usize)
    ))
}

/// How long it may take, by the first block of the largest tensor.
fn estimate(plan: &Plan, request: &Request) -> Result<String> {
    let Some(Speed { read_bytes_s, encode_bytes_s }) = convert::probe(plan, request)? else {
        return Ok(String::new());
    };
    let (bytes_in, bytes_out) = (plan.bytes_in() as f64, plan.bytes_out() as f64);
    // A drive is asked for both; encoding goes on beside it.
    let seconds = ((bytes_in + bytes_out) / read_bytes_s).max(bytes_in / encode_bytes_s);
    let [read, encode] = [read_bytes_s, encode_bytes_s].map(|bytes_s| bytes_s / 1e9);
    Ok(format!(
        "about {:.1} minutes, if blocks like the first are read at {read:.2} GB/s and encoded at \
         {encode:.2}\n",
        seconds / 60.0
    ))
}

/// How much was read, and how fast.
fn progress(done_bytes: usize, all_bytes: u64, start: Instant) -> String {
    let gbs = done_bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
    format!("{} of {}, {gbs:.2} GB/s", gb(done_bytes), gb(all_bytes as usize))
}

fn request(args: &Args) -> Result<Request> {
    let mut formats = Formats::default();
    let is_on = |name: &str| args.get(name) != Some("off");
    for class in Class::ALL {
        let name = format!("--{}", class.name());
        if let Some(text) = args.get(&name)
            && (text != "off" || ![INDEXER, MTP].contains(&&*name))
        {
            formats.set(class, parse_format(text).map_err(|error| usage(&name, error))?);
        } else if let Some(model) = class.model() {
            formats.set(class, formats.of(model));
        }
    }
    let to = PathBuf::from(args.required("--to")?);
    let repo = repo(args)?;
    let from = match repo {
        Some(_) => to.join(DIR_NAME),
        None => args.required("--from")?.into(),
    };
    let scales = Scales::parse(args.get(SCALES).unwrap_or("abs-max"));
    let scales = scales.map_err(|error| usage(SCALES, error))?;
    if args.has(CALIBRATION) && scales != Scales::Search {
        return Err(Error::usage(format!("{CALIBRATION} needs {SCALES} search")));
    }
    let keep_free_gb = args.number("--keep-free", 0.0..=1e6)?.unwrap_or(KEEP_FREE_GB);
    Ok(Request {
        from,
        to,
        formats,
        scales,
        calibration: None,
        mtp: is_on(MTP),
        indexer: is_on(INDEXER),
        keep_free_bytes: (keep_free_gb * 1e9).round() as u64,
        delete_source: args.has("--delete-source") || repo.is_some(),
        repo,
        threads: args.number("--threads", 1..=1024)?.unwrap_or_else(cpu::default_threads),
    })
}

/// What `--repo` names.
fn repo(args: &Args) -> Result<Option<Repo>> {
    let (base_url, source) = args.given(BASE_URL).unwrap_or((DEFAULT_BASE_URL, REPO));
    let Some(name) = args.get(REPO) else {
        return match source {
            BASE_URL => Err(Error::usage(format!("{BASE_URL} needs {REPO}"))),
            _ => Ok(None),
        };
    };
    if args.has("--from") {
        return Err(Error::usage(format!("--from and {REPO} exclude each other")));
    }
    let token = std::env::var("HF_TOKEN").ok();
    Repo::new(base_url, name, token).map(Some).map_err(|error| usage(REPO, error))
}

/// Room on the drive of a directory that may not exist yet.
fn free_bytes(dir: &Path) -> Option<u64> {
    let parents =
        dir.ancestors().map(|dir| if dir == Path::new("") { Path::new(".") } else { dir });
    sys::disk_free_bytes(parents.into_iter().find(|dir| sys::is_present(dir))?)
}

/// The plan, for a person.
fn describe(plan: &Plan, request: &Request, free: Option<u64>) -> String {
    let (sources, records) = (&plan.manifest.sources, &plan.manifest.outputs);
    let finished = records.len() - plan.outputs.len();
    let there = if finished > 0 { format!(", {finished} are finished") } else { String::new() };
    let mut text = format!(
        "{}: {} files, {} to read\n{}: {} files{there}, {} to write; {} free, of which {} stay\n",
        request.from.display(),
        sources.len(),
        gb(plan.bytes_in() as usize),
        request.to.display(),
        records.len(),
        gb(plan.bytes_out() as usize),
        free.map_or("?".into(), |bytes| gb(bytes as usize)),
        gb(request.keep_free_bytes as usize)
    );
    for (class, total) in Class::ALL.into_iter().zip(plan.totals()) {
        let Totals { tensors, bytes_in, bytes_out } = total;
        if tensors > 0 {
            let (name, format) = (class.name(), request.formats.of(class).to_string());
            let [read, written] = [bytes_in, bytes_out].map(|bytes| gb(bytes as usize));
            text +=
                &format!("  {name:11}  {format:13}  {tensors:6} tensors  {read} to {written}\n");
        }
    }
    if let Some(calibration) = &request.calibration {
        let (weighed, searched) = plan.searched(calibration);
        text +=
            &format!("  {weighed} of {searched} matrices by the calibration, the others plain\n");
    }
    let head_format = request.formats.of(Class::Mtp);
    if let Some(warning) = draft_head_warning(head_format)
        && plan.totals()[Class::Mtp as usize].tensors > 0
    {
        text += &format!("warning: {warning}\n");
    }
    text
}
