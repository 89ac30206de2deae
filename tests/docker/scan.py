"""Lists the ports of another machine that take a connection; a container runs this program."""

SCAN = """
import socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as one:
        one.settimeout(2)
        if one.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(found)
"""
