# Plays eight games at once, each in a session of its own, and prints how well.
extends Node2D

const Game = preload("res://game.gd")
const GAMES = 8
const REPORTED = 40  # games in a line

var ended = 0
var caught = 0


func _ready():
	randomize()
	for number in GAMES:
		var game = Game.new("game-%d" % number)
		game.position = Vector2(20 + 205 * (number % 4), 20 + 210 * (number / 4))
		game.connect("over", self, "_on_over")
		add_child(game)


func _on_over(stars):
	ended += 1
	caught += stars
	if ended % REPORTED == 0:
		var mean = caught / float(REPORTED)
		print("%d s, %d games, %.1f of 16 stars caught" % [OS.get_ticks_msec() / 1000, ended, mean])
		caught = 0
