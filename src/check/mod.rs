//! Placeholder: its owner replaces this file.
