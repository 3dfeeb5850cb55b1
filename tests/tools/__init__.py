"""Tests of the scripts that set the project up."""
