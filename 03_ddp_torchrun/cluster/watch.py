"""What the hosts print, line by line, and a link that goes down when they print it."""

import os
import subprocess
import threading
import time
from argparse import Namespace

from network import Host, set_link


class Watch:
    """Prints what the hosts print, and takes a link down at the right moment."""

    def __init__(self, hosts: list[Host], options: Namespace) -> None:
        """Read from `options` whose link goes down, and when."""
        self.hosts, self.options = hosts, options
        self.lock = threading.Lock()
        self.is_over = options.down_when is None

    def say(self, name: str, text: str) -> None:
        """Print one line behind its name."""
        with self.lock:
            try:
                for line in text.split("\n"):
                    print(f"{name} | {line}", flush=True)
            except BrokenPipeError:
                os._exit(1)  # nobody reads any more; all hosts end with this process

    def follow(self, host: Host, process: subprocess.Popen[str]) -> None:
        """Print what runs on one host, to its end."""
        assert process.stdout is not None
        for line in process.stdout:
            self.say(host.name, line.rstrip("\n"))
            if not self.is_over and self.options.down_when in line:
                self.is_over = True
                threading.Thread(target=self.interrupt, daemon=True).start()

    def interrupt(self) -> None:
        """Take the link down; put it up again later if that was asked for."""
        host = self.hosts[self.options.down_host]
        set_link(host, "down")
        self.say("lab  ", f"the link of {host.name} is down")
        if self.options.up_after is not None:
            time.sleep(self.options.up_after)
            set_link(host, "up")
            self.say("lab  ", f"the link of {host.name} is up again")
