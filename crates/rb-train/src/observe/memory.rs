//! Memory of this process: how much is resident, and that it is kept between steps.

/// Returns the bytes of physical memory that this process holds, or `None` where the system does not tell.
pub fn resident_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        resident_pages(&statm)?.checked_mul(page_bytes()?)
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// Lets glibc keep the memory that a step frees for the next step, which asks for the same. Without this it goes
/// back to the system at the end of a step and is faulted in again page by page: up to a sixth of the time of a
/// small model (docs/log.md). For the beginning of `main`; does nothing on other systems.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // The largest buffer that glibc takes from its heap at all: half of HEAP_MAX_SIZE.
        const HEAP_BUFFER_BYTES: libc::c_int = 32 << 20;
        // Free bytes at the end of the heap that are kept, and bytes by which it grows.
        const KEPT_BYTES: libc::c_int = 1 << 30;
        const GROWTH_BYTES: libc::c_int = 64 << 20;
        for (parameter, bytes) in [
            (libc::M_MMAP_THRESHOLD, HEAP_BUFFER_BYTES),
            (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
            (libc::M_TOP_PAD, GROWTH_BYTES),
        ] {
            // SAFETY: mallopt takes two integers and changes settings of the allocator under its own lock; a value
            // it does not accept is ignored.
            unsafe { libc::mallopt(parameter, bytes) };
        }
    }
}

/// The second field of `/proc/self/statm`: resident pages.
#[cfg(any(target_os = "linux", test))]
fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(target_os = "linux")]
fn page_bytes() -> Option<u64> {
    // SAFETY: sysconf takes a plain integer, reads a constant of the system and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).ok().filter(|&b| b > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_is_parsed() {
        assert_eq!(resident_pages("12345 678 90 1 0 2 0\n"), Some(678));
        assert_eq!(resident_pages("12345"), None);
        assert_eq!(resident_pages("a b"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn grows_with_what_is_touched() {
        let before = resident_bytes().unwrap();
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = resident_bytes().unwrap();
        assert!(before > 1 << 20);
        // Other tests may free memory meanwhile, so half of the block is asked for.
        assert!(after >= before + (32 << 20), "{before} -> {after}");
        drop(block);
    }
}
