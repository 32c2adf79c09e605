//! What a conversion will do, decided from headers alone: which output files there will be, what
//! stands where in each, and which source files each of them needs.
//!
//! Output files follow the source's: the tensors of source file i are in `out-{i:05}`, those of
//! the draft head and of the indexers in further families counted on their own. Within a file
//! wider elements come first and then names decide, as every safetensors writer does it.

#![forbid(unsafe_code)]

use super::calibration::Calibration;
use super::classes::{Class, Part, classify};
use super::manifest::{FILE_NAME, Manifest, PARTIAL, Record, SourceFile, hash_header};
use super::{METADATA_BYTES_MAX, METADATA_FILES, Request};
use crate::bail;
use crate::config::Config;
use crate::error::{Context, Result};
use crate::json::{Value, object, to_compact, write_str_compact};
use crate::quant::{self, Format};
use crate::safetensors::{Directory, Dtype, STAMP_KEY, Shard};
use crate::sys;
use crate::weights::{MatrixSource, Weights};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

/// One tensor of an output.
pub struct Tensor {
    /// Its place in the source; shards are numbered as in the manifest.
    pub source: MatrixSource,
    /// What decided its format.
    pub class: Class,
    /// How it will be stored; the bytes of the source, if that is their format.
    pub format: Format,
    /// As the source has it; quantized tensors are stored flat.
    shape: Box<[usize]>,
    /// Where its weights go, and the number of that part in the order of the file.
    pub weights: (u64, usize),
    /// The same for its scales, if it has any.
    pub scales: (u64, usize),
}

/// One output file that is still to be made.
pub struct Output {
    /// Its number in the manifest.
    pub index: usize,
    /// Length word and JSON, padded.
    pub header: Vec<u8>,
    /// In the order in which the source has them.
    pub tensors: Vec<Tensor>,
}

/// What of a class there is to do.
#[derive(Clone, Copy, Default)]
pub struct Totals {
    /// Tensors, sidecars not counted.
    pub tensors: usize,
    /// Bytes to read.
    pub bytes_in: u64,
    /// Bytes to write, without headers.
    pub bytes_out: u64,
}

/// The whole plan.
pub struct Plan {
    /// What is recorded: as it will be at the start, or as an earlier run left it.
    pub manifest: Manifest,
    /// The outputs that are not finished, in order.
    pub outputs: Vec<Output>,
    /// The record that was found.
    pub begun: Option<Manifest>,
}

impl Plan {
    /// Plans a new conversion, or what is left of one that was begun with the same request.
    ///
    /// Errors: another model type, before any shard is opened; a tensor that is missing, misshapen
    /// or of no known encoding; a format that readers would take for another one; an output
    /// directory with other files; a request or a source that differs from what was begun. What is
    /// finished needs no source any more.
    pub fn new(request: &Request) -> Result<Plan> {
        let begun = Manifest::read(&request.to)?;
        let settings = request.settings();
        let (manifest, outputs) = match begun.clone() {
            Some(manifest) => {
                let record = request.to.join(FILE_NAME);
                check_settings(&manifest.settings, &settings).context(|| record.display())?;
                resume(request, manifest)?
            }
            None => begin(request, settings)?,
        };
        let plan = Plan { manifest, outputs, begun };
        plan.check_target(request)?;
        Ok(plan)
    }

    /// The record of an output.
    pub fn record(&self, output: &Output) -> &Record {
        &self.manifest.outputs[output.index]
    }

    /// Sums over all that is left, by class.
    pub fn totals(&self) -> [Totals; Class::ALL.len()] {
        let mut totals = [Totals::default(); Class::ALL.len()];
        for tensor in self.outputs.iter().flat_map(|output| &output.tensors) {
            let total = &mut totals[tensor.class as usize];
            total.tensors += 1;
            total.bytes_in += tensor.source.bytes() as u64;
            total.bytes_out += (tensor.weight_bytes() + tensor.scale_bytes()) as u64;
        }
        totals
    }

    /// Matrices whose scales are chosen, and how many of them a calibration says something of.
    pub fn searched(&self, calibration: &Calibration) -> (usize, usize) {
        let tensors = self.outputs.iter().flat_map(|output| &output.tensors);
        let searched = tensors.filter(|t| t.format != t.source.format && t.scale_bytes() > 0);
        searched.fold((0, 0), |(weighed, all), Tensor { source, .. }| {
            let known = calibration.importance(&source.name, source.cols);
            (weighed + usize::from(matches!(known, Ok(Some(_)))), all + 1)
        })
    }

    /// Bytes that are left to write, headers included.
    pub fn bytes_out(&self) -> u64 {
        self.outputs.iter().map(|output| self.record(output).bytes).sum()
    }

    /// Bytes that are left to read.
    pub fn bytes_in(&self) -> u64 {
        self.totals().iter().map(|total| total.bytes_in).sum()
    }

    /// For a source that is fetched: bytes that are left to fetch, and how many there are of its
    /// shards at once, at most.
    pub fn fetches(&self, request: &Request) -> (u64, u64) {
        let (mut left, mut held_max, mut held) = (0, 0, BTreeSet::new());
        let bytes = |shard: &usize| self.manifest.sources[*shard].bytes;
        for (i, output) in self.outputs.iter().enumerate() {
            for shard in output.shards() {
                let path = request.from.join(&self.manifest.sources[shard].name);
                if held.insert(shard) && path.is_symlink() {
                    let partial = path.with_added_extension(&PARTIAL[1..]);
                    let found = partial.metadata().map_or(0, |found| found.len());
                    left += bytes(&shard).saturating_sub(found);
                }
            }
            held_max = held.iter().map(bytes).sum::<u64>().max(held_max);
            let later = &self.outputs[i + 1..];
            held.retain(|shard| later.iter().any(|o| self.record(o).needs.contains(shard)));
        }
        (left, held_max)
    }

    /// Refuses an output directory with files that this conversion did not make and that it would
    /// replace, or that a reader would take for a part of the model.
    fn check_target(&self, request: &Request) -> Result<()> {
        let to = &request.to;
        if !sys::is_present(to) {
            return Ok(());
        }
        let is_begun = self.begun.is_some();
        let foreign = |name: &str| {
            let base = name.strip_suffix(PARTIAL);
            let record = |name| self.manifest.outputs.iter().find(|record| record.name == name);
            match (base, record(base.unwrap_or(name))) {
                (Some(_), Some(_)) => !is_begun,
                (None, Some(record)) => record.hash.is_none(),
                (_, None) => base.unwrap_or(name).ends_with(".safetensors"),
            }
        };
        for entry in std::fs::read_dir(to).context(|| to.display())? {
            let name = entry.context(|| to.display())?.file_name();
            if name.to_str().is_some_and(foreign) {
                bail!(
                    "{}: already there, and not made by this conversion: move it away, or choose \
                     another --to",
                    to.join(name).display()
                );
            }
        }
        for name in METADATA_FILES {
            let (source, target) = (request.from.join(name), to.join(name));
            if sys::is_present(&source) && sys::is_present(&target) {
                let read = |path: &Path| {
                    sys::read_file(path, METADATA_BYTES_MAX).context(|| path.display())
                };
                if read(&source)? != read(&target)? {
                    let source = source.display();
                    bail!(
                        "{}: already there, and not a copy of {source}: move it away, or choose \
                         another --to",
                        target.display()
                    );
                }
            }
        }
        Ok(())
    }
}

impl Output {
    /// The source files that its tensors lie in.
    pub fn shards(&self) -> BTreeSet<usize> {
        let spans = |tensor: &Tensor| [Some(tensor.source.weights), tensor.source.scales];
        self.tensors.iter().flat_map(spans).flatten().map(|span| span.shard).collect()
    }
}

impl Tensor {
    /// Bytes of its weights in the output.
    pub fn weight_bytes(&self) -> usize {
        self.source.rows * self.format.row_bytes(self.source.cols)
    }

    /// Bytes of its scales in the output.
    pub fn scale_bytes(&self) -> usize {
        self.format.scale_bytes(self.source.rows, self.source.cols)
    }
}

/// Refuses another request than the one that was begun, by the first setting that differs.
fn check_settings(begun: &[(String, String)], asked: &[(String, String)]) -> Result<()> {
    for (name, value) in asked {
        let before = begun.iter().find(|(begun, _)| begun == name).map(|(_, value)| &**value);
        if before != Some(value) {
            let before = before.unwrap_or("nothing");
            bail!(
                "begun with {name} {before}, now asked for {name} {value}: ask for the former, or \
                 choose another --to"
            );
        }
    }
    Ok(())
}

type Planned = (Manifest, Vec<Output>);

/// Of a source file.
const CHANGED: &str = "it changed since the conversion began: bring back what it was, or choose \
                       another --to";

/// The plan of a conversion that no run has begun.
fn begin(request: &Request, settings: Vec<(String, String)>) -> Result<Planned> {
    let config = &Config::load(&request.from)?;
    let directory = Directory::open(&request.from)?;
    if let Some((name, _)) = directory.iter().find(|(name, _)| name.ends_with(".qs")) {
        bail!(
            "{}: already a container: it has {name}: convert the checkpoint that it was made of",
            request.from.display()
        );
    }
    // A tensor that is missing should not be found out after hours.
    Weights::bind(&directory, config)?;
    let source = |shard: &Shard| {
        let name = shard.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(SourceFile { name, bytes: shard.bytes, header_hash: hash_header(shard)? })
    };
    let sources: Vec<SourceFile> = directory.shards().iter().map(source).collect::<Result<_>>()?;
    let all: Vec<usize> = (0..sources.len()).collect();
    let mut groups = group(request, config, &directory, &all, &BTreeSet::new())?;
    // Every source file has its output, be it empty: a gap in the numbers means a missing file.
    all.into_iter().for_each(|i| _ = groups.entry((i, Part::Main)).or_default());
    let mut numbers = BTreeMap::new();
    let (mut records, mut outputs) = (Vec::new(), Vec::new());
    for (index, ((source, part), Group { mut tensors, mut needs })) in
        groups.into_iter().enumerate()
    {
        needs.insert(source);
        let number = numbers.entry(part).or_insert(0);
        let name = part.file_name(*number);
        *number += 1;
        let (header, bytes) = lay_out(&mut tensors);
        let needs = needs.into_iter().collect();
        records.push(Record { name, source, needs, bytes, hash: None });
        outputs.push(Output { index, header, tensors });
    }
    Ok((Manifest { settings, sources, outputs: records }, outputs))
}

/// The plan of what an earlier run left to do.
fn resume(request: &Request, mut manifest: Manifest) -> Result<Planned> {
    for record in &mut manifest.outputs {
        let path = request.to.join(&record.name);
        let partial = request.to.join(format!("{}{PARTIAL}", record.name));
        if record.hash.is_none() || sys::is_present(&path) {
            let found = path.metadata().map_or(record.bytes, |found| found.len());
            if found != record.bytes {
                bail!(
                    "{}: expected {} bytes, found {found}: it was changed: delete it, and run the \
                     same command again",
                    path.display(),
                    record.bytes
                );
            }
        } else if !sys::is_present(&partial) {
            // Deleted or moved away: it is made anew.
            record.hash = None;
        }
    }
    let left =
        |i: usize| manifest.outputs.iter().find(|o| o.hash.is_none() && o.needs.contains(&i));
    let mut present = Vec::new();
    for (i, file) in manifest.sources.iter().enumerate() {
        let path = request.from.join(&file.name);
        match (path.metadata(), left(i)) {
            (Ok(found), _) if found.len() == file.bytes => present.push(i),
            (Ok(found), _) => {
                let (wanted, found) = (file.bytes, found.len());
                bail!("{}: expected {wanted} bytes, found {found}: {CHANGED}", path.display());
            }
            (Err(error), Some(output)) => bail!(
                "{}, for {}: {error}: bring it back, and run the same command again",
                path.display(),
                output.name
            ),
            (Err(_), None) => {}
        }
    }
    let paths: Vec<_> =
        present.iter().map(|i| request.from.join(&manifest.sources[*i].name)).collect();
    let directory = Directory::open_files(&request.from, &paths)?;
    for (shard, i) in directory.shards().iter().zip(&present) {
        if hash_header(shard)? != manifest.sources[*i].header_hash {
            bail!("{}: other tensors than before: {CHANGED}", shard.path.display());
        }
    }
    if manifest.outputs.iter().all(|record| record.hash.is_some()) {
        return Ok((manifest, Vec::new()));
    }
    let config = &Config::load(&request.from)?;
    let finished = manifest.outputs.iter().filter(|record| record.hash.is_some());
    let finished = finished.map(|record| (record.source, Part::of_file(&record.name))).collect();
    let mut groups = group(request, config, &directory, &present, &finished)?;
    let mut outputs = Vec::new();
    for (index, record) in manifest.outputs.iter().enumerate() {
        if record.hash.is_none() {
            let group = groups.remove(&(record.source, Part::of_file(&record.name)));
            let mut tensors = group.unwrap_or_default().tensors;
            let (header, bytes) = lay_out(&mut tensors);
            if bytes != record.bytes {
                let source = request.from.join(&manifest.sources[record.source].name);
                bail!("{}: {CHANGED}", source.display());
            }
            outputs.push(Output { index, header, tensors });
        }
    }
    Ok((manifest, outputs))
}

/// The tensors of one output, and the source files that they lie in.
#[derive(Default)]
struct Group {
    tensors: Vec<Tensor>,
    needs: BTreeSet<usize>,
}

/// All tensors that are kept, by output, without those of outputs that are `finished`. Shard i of
/// the directory is source file `numbers[i]`.
fn group(
    request: &Request,
    config: &Config,
    directory: &Directory,
    numbers: &[usize],
    finished: &BTreeSet<(usize, Part)>,
) -> Result<BTreeMap<(usize, Part), Group>> {
    let mut groups: BTreeMap<(usize, Part), Group> = BTreeMap::new();
    for (name, stored) in directory.iter() {
        let kept = classify(name, stored.shape.len(), config.num_layers);
        let Some((part, class)) = kept else { continue };
        let is_off =
            part == Part::Mtp && !request.mtp || name.contains(".indexer.") && !request.indexer;
        let key = (numbers[stored.shard as usize], part);
        if is_off || finished.contains(&key) {
            continue;
        }
        let context = || format!("{}: tensor {name}", directory.shard(stored).path.display());
        let (rows, cols) = match stored.shape[..] {
            [cols] => (1, cols),
            // Two columns a byte.
            [rows, bytes] if stored.dtype == Dtype::U8 => (rows, bytes.saturating_mul(2)),
            [rows, cols] => (rows, cols),
            _ => bail!("{}: expected a vector or a matrix, found {:?}", context(), stored.shape),
        };
        let mut source = MatrixSource::bind(directory, name, rows, cols)?;
        let format = target_format(request, class, &source).context(context)?;
        if let Some(calibration) = &request.calibration {
            calibration.importance(name, cols).context(context)?;
        }
        let group = groups.entry(key).or_default();
        source.weights.shard = key.0;
        if let Some(scales) = &mut source.scales {
            scales.shard = numbers[scales.shard];
        }
        for sidecar in ["_scale_inv", "_scale", "_scale_2"] {
            let stored = directory.get(&format!("{name}{sidecar}"));
            group.needs.extend(stored.map(|stored| numbers[stored.shard as usize]));
        }
        let shape = stored.shape.clone();
        let (weights, scales) = ((0, 0), (0, 0));
        group.tensors.push(Tensor { source, class, format, shape, weights, scales });
    }
    Ok(groups)
}

/// What a matrix of a class becomes. Errors: FP8 asked of other bytes; sizes that a reader would
/// take for another format.
fn target_format(request: &Request, class: Class, source: &MatrixSource) -> Result<Format> {
    let flag = class.name();
    let format = match (request.formats.of(class), source.format) {
        (Format::Fp8Block, Format::Nvfp4) => bail!(
            "fp8 keeps what is FP8, but this is {}: choose another format with --{flag}",
            source.format
        ),
        // Nothing is made FP8 here, and floats lose nothing as they are.
        (Format::Fp8Block, kept) => kept,
        (asked, _) => asked,
    };
    if !matches!(format, Format::F32 | Format::Bf16 | Format::F16)
        && !resolves(format, source, None)
        && !needs_stamp(format, source)
    {
        let (rows, cols) = (source.rows, source.cols);
        bail!(
            "a reader could not tell {format} of a [{rows}, {cols}] matrix by its size: choose \
             another format with --{flag}"
        );
    }
    Ok(format)
}

/// Whether readers see `format` in the sizes of the matrix, or what is the same to the byte: one
/// group that holds the whole row.
fn resolves(format: Format, source: &MatrixSource, stamp: Option<&str>) -> bool {
    let (rows, cols) = (source.rows, source.cols);
    let weight_bytes = (rows * format.row_bytes(cols)) as u64;
    let scale_bytes = format.scale_bytes(rows, cols) as u64;
    let found = quant::resolve(rows, cols, weight_bytes, scale_bytes, stamp);
    let is_row = |found| match format {
        Format::Int4Group(columns) => found == Format::Int4Row && cols <= columns,
        _ => false,
    };
    found.is_ok_and(|found| found == format || is_row(found))
}

/// Whether a stamp, which readers do not look at for routed experts, tells the format and sizes do
/// not.
fn needs_stamp(format: Format, source: &MatrixSource) -> bool {
    let stamp = quant::stamp_of(format);
    let is_expert = source.name.contains(".mlp.experts.");
    !is_expert && !resolves(format, source, None) && resolves(format, source, stamp)
}

/// One entry of a header.
pub struct Entry {
    /// Type of its elements.
    pub dtype: Dtype,
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Length; entries follow each other without gaps.
    pub bytes: usize,
    /// Number of its tensor, and whether it is its scales.
    pub tensor: (usize, bool),
}

/// Places everything; returns the header with its length word, and the length of the file.
fn lay_out(tensors: &mut [Tensor]) -> (Vec<u8>, u64) {
    let mut entries = Vec::new();
    let mut stamps = Vec::new();
    for (i, tensor) in tensors.iter().enumerate() {
        let (name, bytes) = (tensor.source.name.to_string(), tensor.weight_bytes());
        let plain = match tensor.format {
            Format::F32 => Some(Dtype::F32),
            Format::Bf16 => Some(Dtype::Bf16),
            Format::F16 => Some(Dtype::F16),
            _ => None,
        };
        if let Some(dtype) = plain {
            let shape = tensor.shape.to_vec();
            entries.push(Entry { dtype, name, shape, bytes, tensor: (i, false) });
            continue;
        }
        if needs_stamp(tensor.format, &tensor.source) {
            let stamp = quant::stamp_of(tensor.format).unwrap_or_default();
            stamps.push((&*tensor.source.name, Value::String(stamp.into())));
        }
        let scales = format!("{name}.qs");
        for (dtype, name, bytes, is_scales) in
            [(Dtype::U8, name, bytes, false), (Dtype::F32, scales, tensor.scale_bytes(), true)]
        {
            let shape = vec![bytes / dtype.size_bytes() as usize];
            entries.push(Entry { dtype, name, shape, bytes, tensor: (i, is_scales) });
        }
    }
    let stamps = (!stamps.is_empty()).then(|| (STAMP_KEY, to_compact(&object(stamps))));
    entries.sort_by(|a, b| {
        (Reverse(a.dtype.size_bytes()), &a.name).cmp(&(Reverse(b.dtype.size_bytes()), &b.name))
    });
    let header = header(&entries, stamps);
    let mut offset = header.len() as u64;
    for (number, Entry { bytes, tensor: (i, is_scales), .. }) in entries.iter().enumerate() {
        let place = if *is_scales { &mut tensors[*i].scales } else { &mut tensors[*i].weights };
        // The header is part 0.
        *place = (offset, number + 1);
        offset += *bytes as u64;
    }
    (header, offset)
}

/// Compact JSON, padded with spaces to a multiple of eight bytes, behind its length.
pub fn header(entries: &[Entry], metadata: Option<(&str, String)>) -> Vec<u8> {
    let mut text = String::from("{");
    if let Some((key, value)) = metadata {
        let metadata = object(vec![(key, Value::String(value))]);
        write!(text, "\"__metadata__\":{},", to_compact(&metadata)).expect("a String takes all");
    }
    let mut offset = 0;
    for Entry { dtype, name, shape, bytes, .. } in entries {
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        let (dtype, shape, end) = (dtype.name(), shape.join(","), offset + bytes);
        write_str_compact(&mut text, name);
        write!(
            text,
            ":{{\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{offset},{end}]}},"
        )
        .expect("a String takes all");
        offset = end;
    }
    text.truncate(text.trim_end_matches(',').len());
    text.push('}');
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.bytes());
    header
}
