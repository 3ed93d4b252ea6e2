//! The pure core of the page allocator: a free list, reference counts, and the lease that owns pages for a sequence's whole life.
//!
//! I3 holds after every call: free + assigned = total. Nobody frees a page by its number: pages come back only as the
//! `ReturnedPages` that a dropped `PageLease` makes, so a page cannot come back twice or without having been out.

mod lease;

pub use lease::{PageHome, PageLease, ReturnedPages};

use crate::admission::RequestId;

/// The KV pages of one device. Reserves all or nothing; the most recently freed page goes out first.
#[derive(Debug)]
pub struct Pool {
    free: Vec<u32>,
    references: Vec<u32>,
}

/// The pool cannot serve a reservation now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{needed} KV pages are needed and {free} are free: wait until a sequence ends")]
pub struct Insufficient {
    /// Pages asked for.
    pub needed: usize,
    /// Pages free.
    pub free: usize,
}

impl Pool {
    /// A pool of `total` free pages, numbered from 0.
    pub fn new(total: usize) -> Self {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        Self { free: (0..total).rev().collect(), references: vec![0; total as usize] }
    }

    /// Takes `pages` pages for `request`, all or none; `home` gets them back when the lease drops.
    ///
    /// # Errors
    /// `Insufficient` when fewer are free; the pool is unchanged.
    pub fn reserve(&mut self, request: RequestId, pages: usize, home: PageHome) -> Result<PageLease, Insufficient> {
        let Some(keep) = self.free.len().checked_sub(pages) else {
            return Err(Insufficient { needed: pages, free: self.free.len() });
        };
        let mut taken = self.free.split_off(keep);
        taken.reverse();
        for &page in &taken {
            debug_assert_eq!(self.references[page as usize], 0, "page {page} was free and referenced");
            self.references[page as usize] = 1;
        }
        self.check();
        Ok(PageLease::new(request, taken, home))
    }

    /// A second lease on the pages of the first `full_pages` of `lease`: full prefix pages may have several readers (I4).
    pub fn share(&mut self, lease: &PageLease, full_pages: usize, request: RequestId, home: PageHome) -> PageLease {
        let pages = lease.pages()[..full_pages.min(lease.pages().len())].to_vec();
        for &page in &pages {
            self.references[page as usize] += 1;
        }
        PageLease::new(request, pages, home)
    }

    /// Takes back what a dropped lease held; returns how many pages became free.
    pub fn release(&mut self, returned: ReturnedPages) -> usize {
        let before = self.free.len();
        for page in returned.into_pages() {
            let references = &mut self.references[page as usize];
            debug_assert!(*references > 0, "page {page} came back without being out");
            *references = references.saturating_sub(1);
            if *references == 0 {
                self.free.push(page);
            }
        }
        self.check();
        self.free.len() - before
    }

    /// Pages in all.
    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages with at least one holder.
    pub fn assigned(&self) -> usize {
        self.total() - self.free()
    }

    /// I3, the costly way: assigned pages counted by their references.
    fn check(&self) {
        debug_assert_eq!(self.references.iter().filter(|&&r| r > 0).count(), self.assigned(), "I3");
    }
}

#[cfg(test)]
mod tests;
