"""Security events for a hospital's or a consortium's log system: what is logged, from which records, to
which target.
"""
