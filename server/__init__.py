"""The server's side: offers queries to sites, aggregates their codes, releases answers, decodes them, trains the
student.
"""
