# The server's image with systemd as its init, for tests of the units: what a machine without containers looks like.
FROM consilium-server:local
USER root
RUN userdel consilium && apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends procps systemd systemd-sysv \
    && rm -rf /var/lib/apt/lists/*
COPY *.service /etc/systemd/system/
COPY consilium.sysusers /etc/sysusers.d/consilium.conf
COPY consilium.tmpfiles /etc/tmpfiles.d/consilium.conf
ENTRYPOINT ["/lib/systemd/systemd"]
CMD []
