//! What the page allocator is asked.

use actix::Message;

use crate::admission::RequestId;
use crate::pages::ReturnedPages;

/// Lease pages for a request's whole life. Answered by `Reserved` or `Insufficient`.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Reserve {
    /// For whom.
    pub request: RequestId,
    /// How many.
    pub pages: usize,
}

/// Sent by a dropped lease, and by nothing else.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Release(pub ReturnedPages);
