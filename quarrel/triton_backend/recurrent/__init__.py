"""Convolutions and selective scans."""
