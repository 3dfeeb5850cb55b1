"""Tests of call logging, dumps and replay."""
