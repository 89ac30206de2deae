"""The ``consilium`` command: joins the server's and the site's commands, and runs the demo with both on one host."""
