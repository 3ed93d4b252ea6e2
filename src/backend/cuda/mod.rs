//! The CUDA backend. Placeholder: its owner replaces this file.
