//! The CPU backend. Placeholder: its owner replaces this file.
