"""Security events for a hospital's or a consortium's own log system: what is logged, from where, to where."""
