//! What the server tells about itself: logs, metrics, /stats. All of it renders from the account that admission publishes, so that
//! the conservation laws hold at any scrape (I10).

pub mod log;
pub mod metrics;
pub mod names;
pub mod stats;
