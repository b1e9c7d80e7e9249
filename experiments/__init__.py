"""The papers' tables and figures on real data, one file each; results/ keeps numbers and pictures."""
