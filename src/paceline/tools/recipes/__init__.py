"""Recipes: whole training programs that come with Paceline, one file each."""
