//! Reading a corpus on several threads, in the order of one.
//!
//! Threads take the parts of the files in order. What they read waits in the queue of its part, and whoever asks gets
//! the queues one after the other. All that waits is bounded by [`AHEAD_BYTES`]; the part that is asked for may always
//! add to an empty queue, so that a document larger than the bound passes, and nobody waits for ever.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::compressed::Compression;
use super::documents::{Open, end};
use super::part::{Part, parts, size};
use super::{Corpus, CorpusOptions, CorpusStats, Document, Format, Source, SourceStats};
use crate::error::{DataError, Result};

/// Text that is read and waits.
const AHEAD_BYTES: usize = 64 << 20;
/// Text that a thread hands over at once.
const BATCH_BYTES: usize = 1 << 20;
/// What a document takes beside its text.
const DOCUMENT_BYTES: usize = 128;
/// Threads that read at most.
const MOST_THREADS: usize = 16;
/// How many times larger than its file a compressed text is taken to be before it is read.
const PACKED: usize = 4;

type Judge<A> = Box<dyn Fn(&Document) -> Option<A> + Send + Sync>;

/// Documents of a corpus in order, with what was found out about each; made by [`Corpus::read_ahead`].
pub struct ReadAhead<A: Send + 'static> {
    shared: Arc<Shared<A>>,
    threads: Vec<JoinHandle<()>>,
    told_of_empty: Arc<AtomicBool>,
    /// What was taken from the queues last.
    documents: std::vec::IntoIter<(Document, A)>,
    error: Option<DataError>,
    stats: CorpusStats,
    /// Lines of the file before the part that is read.
    lines: u64,
    done: bool,
}

struct Shared<A> {
    state: Mutex<State<A>>,
    /// There is something to take.
    ready: Condvar,
    /// Something was taken, or nothing is wanted any more.
    room: Condvar,
    options: CorpusOptions,
    judge: Judge<A>,
}

struct State<A> {
    sources: std::vec::IntoIter<Source>,
    /// Parts of a source that nobody reads yet.
    parts: VecDeque<(Source, Part)>,
    /// Parts that are read or wait, in order.
    queues: VecDeque<Queue<A>>,
    /// Number of the first of them.
    first: usize,
    /// Bytes that wait.
    waiting: usize,
    stopped: bool,
    panic: Option<Box<dyn Any + Send>>,
}

struct Queue<A> {
    /// The file, if it begins here and nobody has asked yet.
    begins: Option<Arc<Path>>,
    batches: VecDeque<Batch<A>>,
    /// Lines of the part, once all of it is read.
    ended: Option<u64>,
}

struct Batch<A> {
    documents: Vec<(Document, A)>,
    stats: SourceStats,
    error: Option<DataError>,
    /// What it counts for in [`State::waiting`].
    bytes: usize,
}

/// What comes next.
enum Front<A> {
    File(Arc<Path>),
    Batch(Batch<A>),
    /// A part with so many lines has ended.
    Ended(u64),
    Panic(Box<dyn Any + Send>),
    Wait,
    Nothing,
}

impl<A: Send + 'static> ReadAhead<A> {
    pub(super) fn new(corpus: Corpus, judge: Judge<A>) -> Self {
        let first_file = corpus.sources.first().map(|source| source.file.to_path_buf()).unwrap_or_default();
        let state = State {
            sources: corpus.sources.into_iter(),
            parts: VecDeque::new(),
            queues: VecDeque::new(),
            first: 0,
            waiting: 0,
            stopped: false,
            panic: None,
        };
        let (state, options) = (Mutex::new(state), corpus.options);
        let shared = Arc::new(Shared { state, ready: Condvar::new(), room: Condvar::new(), options, judge });
        let (mut threads, mut error) = (Vec::new(), None);
        for _ in 0..rayon::current_num_threads().clamp(1, MOST_THREADS) {
            let shared = shared.clone();
            match std::thread::Builder::new().name("rb-data read".into()).spawn(move || shared.work()) {
                Ok(thread) => threads.push(thread),
                // Fewer will do, but not none.
                Err(e) => error = Some(DataError::io("start a thread that reads", &first_file, e)),
            }
        }
        Self {
            shared,
            error: error.filter(|_| threads.is_empty()),
            threads,
            told_of_empty: corpus.told_of_empty,
            documents: Vec::new().into_iter(),
            stats: CorpusStats::default(),
            lines: 0,
            done: false,
        }
    }

    /// Counts of what was read so far, documents that were left out included.
    pub fn stats(&self) -> &CorpusStats {
        &self.stats
    }

    fn step(&mut self) -> Result<Option<(Document, A)>> {
        loop {
            if let Some((mut document, judged)) = self.documents.next() {
                document.line += self.lines;
                return Ok(Some((document, judged)));
            }
            if let Some(error) = self.error.take() {
                return Err(error.lines_later(self.lines));
            }
            match self.shared.take() {
                Front::File(file) => {
                    self.stats.sources.push(SourceStats::new(file));
                    self.lines = 0;
                }
                Front::Batch(batch) => {
                    if let Some(stats) = self.stats.sources.last_mut() {
                        stats.add(&batch.stats);
                    }
                    self.documents = batch.documents.into_iter();
                    self.error = batch.error;
                }
                Front::Ended(lines) => self.lines += lines,
                Front::Panic(payload) => std::panic::resume_unwind(payload),
                Front::Wait | Front::Nothing => {
                    return end(&self.stats, &self.told_of_empty).map(|()| None);
                }
            }
        }
    }
}

impl<A: Send + 'static> Iterator for ReadAhead<A> {
    type Item = Result<(Document, A)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.step().transpose();
        self.done = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<A: Send + 'static> Drop for ReadAhead<A> {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // Panics are caught where they happen.
            let _ = thread.join();
        }
    }
}

impl<A> State<A> {
    fn front(&mut self) -> Front<A> {
        if let Some(payload) = self.panic.take() {
            return Front::Panic(payload);
        }
        let Some(queue) = self.queues.front_mut() else {
            let nothing = self.sources.len() == 0 && self.parts.is_empty();
            return if nothing { Front::Nothing } else { Front::Wait };
        };
        if let Some(file) = queue.begins.take() {
            return Front::File(file);
        }
        if let Some(batch) = queue.batches.pop_front() {
            self.waiting -= batch.bytes;
            return Front::Batch(batch);
        }
        let Some(lines) = queue.ended else { return Front::Wait };
        self.queues.pop_front();
        self.first += 1;
        Front::Ended(lines)
    }

    /// The queue of a part that is being read: it is there until it has ended.
    fn queue(&mut self, number: usize) -> Option<&mut Queue<A>> {
        self.queues.get_mut(number.checked_sub(self.first)?)
    }

    fn has_room(&mut self, number: usize, bytes: usize) -> bool {
        let asked_for = number == self.first && self.queue(number).is_some_and(|q| q.batches.is_empty());
        self.stopped || asked_for || self.waiting.saturating_add(bytes) <= AHEAD_BYTES
    }
}

impl<A> Shared<A> {
    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for what comes next.
    fn take(&self) -> Front<A> {
        let mut state = self.lock();
        loop {
            match state.front() {
                Front::Wait => state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                front => {
                    drop(state);
                    self.room.notify_all();
                    return front;
                }
            }
        }
    }

    fn work(&self) {
        while let Some((number, source, part)) = self.next_part() {
            let read = std::panic::catch_unwind(AssertUnwindSafe(|| self.read(number, &source, part)));
            let mut state = self.lock();
            match read {
                Ok(lines) => {
                    if let Some(queue) = state.queue(number) {
                        queue.ended = Some(lines);
                    }
                }
                Err(payload) => state.panic = Some(payload),
            }
            drop(state);
            self.ready.notify_one();
        }
    }

    fn next_part(&self) -> Option<(usize, Source, Part)> {
        let mut state = self.lock();
        if state.stopped {
            return None;
        }
        if state.parts.is_empty() {
            let source = state.sources.next()?;
            state.parts.extend(parts(&source).into_iter().map(|part| (source.clone(), part)));
        }
        let (source, part) = state.parts.pop_front()?;
        let begins = part.is_first().then(|| source.file.clone());
        state.queues.push_back(Queue { begins, batches: VecDeque::new(), ended: None });
        Some((state.first + state.queues.len() - 1, source, part))
    }

    /// Reads a part into its queue and returns how many lines it has.
    fn read(&self, number: usize, source: &Source, part: Part) -> u64 {
        // A file that is one document is read at once, after there is room for it.
        let whole = (source.kind.format == Format::Txt).then(|| text_bytes(source));
        if whole.is_some_and(|bytes| !self.reserve(number, bytes)) {
            return 0;
        }
        let batch = || Batch {
            documents: Vec::new(),
            stats: SourceStats::new(source.file.clone()),
            error: None,
            bytes: whole.unwrap_or(0),
        };
        let mut open = match Open::new(source, part, &self.options) {
            Ok(open) => open,
            Err(error) => {
                self.push(number, Batch { error: Some(error), ..batch() });
                return 0;
            }
        };
        loop {
            let mut batch = batch();
            let more = self.fill(&mut batch, &mut open) && whole.is_none();
            if let Some(bytes) = whole {
                batch.bytes = bytes;
            } else if !self.reserve(number, batch.bytes) {
                return 0;
            }
            self.push(number, batch);
            if !more {
                return open.lines();
            }
        }
    }

    fn push(&self, number: usize, batch: Batch<A>) {
        if let Some(queue) = self.lock().queue(number) {
            queue.batches.push_back(batch);
        }
        self.ready.notify_one();
    }

    /// Reads some documents; `false` after the last one, or an error.
    fn fill(&self, batch: &mut Batch<A>, open: &mut Open) -> bool {
        let limit = batch.bytes + BATCH_BYTES;
        while batch.bytes < limit {
            match open.next_document() {
                Ok(None) => return false,
                Err(error) => {
                    batch.error = Some(error);
                    return false;
                }
                Ok(Some(document)) => {
                    if batch.stats.count(&document.text)
                        && let Some(judged) = (self.judge)(&document)
                    {
                        batch.bytes += document.text.len() + DOCUMENT_BYTES;
                        batch.documents.push((document, judged));
                    }
                }
            }
        }
        true
    }

    /// Waits until so many bytes may be added, and counts them; `false` where nothing is wanted any more.
    fn reserve(&self, number: usize, bytes: usize) -> bool {
        let mut state = self.lock();
        while !state.has_room(number, bytes) {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting += bytes;
        !state.stopped
    }
}

/// What a file that is one document is taken to hold, before it is read.
fn text_bytes(source: &Source) -> usize {
    let packed = if source.kind.compression == Compression::None { 1 } else { PACKED };
    usize::try_from(size(&source.file)).unwrap_or(usize::MAX).saturating_mul(packed)
}
