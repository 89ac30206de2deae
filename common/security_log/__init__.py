"""Sends security events to the log system of a hospital or a consortium.

``events`` defines the events, ``follow`` reads them from existing records, ``sinks`` sends them to the targets.
"""
