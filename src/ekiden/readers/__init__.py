"""From files, frames and arrays to tensors of clients."""
