"""One cycle's snapshot, judged: would each server start again, and what would change that."""
