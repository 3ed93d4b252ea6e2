//! A lease: the pages of one sequence for life. Dropping it is the only way in which pages go home.

use std::sync::Arc;

use crate::admission::RequestId;

/// Where a dropped lease sends its pages: the allocator's mailbox in the server, a plain queue in a test. Must not panic.
pub type PageHome = Arc<dyn Fn(ReturnedPages) + Send + Sync>;

/// Pages on their way home. Only a dropped lease makes one.
#[derive(Debug)]
pub struct ReturnedPages {
    request: RequestId,
    pages: Vec<u32>,
}

impl ReturnedPages {
    /// Whose they were.
    pub fn request(&self) -> RequestId {
        self.request
    }

    pub(super) fn into_pages(self) -> Vec<u32> {
        self.pages
    }
}

/// Pages owned for a sequence's whole life; position p of the sequence lives in `pages()[p / page_tokens]`.
pub struct PageLease {
    request: RequestId,
    pages: Vec<u32>,
    home: PageHome,
}

impl PageLease {
    pub(super) fn new(request: RequestId, pages: Vec<u32>, home: PageHome) -> Self {
        Self { request, pages, home }
    }

    /// Whose it is.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// Physical page numbers, in the order of the sequence's positions.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }
}

impl std::fmt::Debug for PageLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageLease").field("request", &self.request).field("pages", &self.pages).finish_non_exhaustive()
    }
}

impl Drop for PageLease {
    fn drop(&mut self) {
        (self.home)(ReturnedPages { request: self.request, pages: std::mem::take(&mut self.pages) });
    }
}
