//! Credits for the logits that the host holds, one a position of a scored prompt. A slice takes them when it is planned and gives them
//! back when its scores are computed or its logits are dropped, so that never more rows of logits `[vocab]` exist than there are
//! credits: in the step in flight, in the sampler's mail and in the scorer's together.

use std::collections::BTreeMap;

use crate::admission::RequestId;

/// Who holds how many. A request holds those of one slice at most; they outlive it, for the logits of a request that was cancelled are
/// there until the scorer has had them.
#[derive(Debug)]
pub(super) struct LogitCredits {
    limit: usize,
    held: BTreeMap<RequestId, usize>,
}

impl LogitCredits {
    /// `limit` credits, none of them held.
    pub fn new(limit: usize) -> Self {
        Self { limit, held: BTreeMap::new() }
    }

    /// Credits that are held.
    pub fn held(&self) -> usize {
        self.held.values().sum()
    }

    /// Credits that are left.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.held())
    }

    /// Whether a slice of this request is not scored yet.
    pub fn holds(&self, request: RequestId) -> bool {
        self.held.contains_key(&request)
    }

    /// A slice of a request that holds none takes as many as it has positions.
    pub fn take(&mut self, request: RequestId, positions: usize) {
        let before = self.held.insert(request, positions);
        debug_assert!(before.is_none() && self.held() <= self.limit, "one slice at a time, within the limit");
    }

    /// The credits of a request's slice come back; without one nothing happens. How many they were.
    pub fn give_back(&mut self, request: RequestId) -> Option<usize> {
        self.held.remove(&request)
    }

    /// No logits will come any more.
    pub fn clear(&mut self) {
        self.held.clear();
    }
}
