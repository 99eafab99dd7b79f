"""Request schedulers on Redis or Valkey: many front ends and many instances share one queue."""
