//! What the scorer is told.

use actix::{Message, Recipient};

use crate::actors::session::messages::TokenBatch;
use crate::scorer::ScoredSlice;

/// Score a slice of a prompt. The planner's credits bound the logits that wait here.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Score(pub ScoredSlice<Recipient<TokenBatch>>);
