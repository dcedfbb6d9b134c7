"""Contenders of `hfaccel bench`, one file each; they run in other environments and import nothing of ours."""
