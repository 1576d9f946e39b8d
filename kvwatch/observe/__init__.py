"""The only code that touches the outside: each source returns an immutable record or a typed failure."""
