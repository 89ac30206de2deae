"""The consortium's side: dispatch, aggregation, release, decoding and the student."""
