# A ship at the bottom catches falling stars, of which there are always two. The policy steers it.
extends Node2D

signal over(caught)

const Client = preload("res://stagecoach_client.gd")
const STARS = 16  # of a game
const FALL = 0.03  # of the height, in a tick
const REACH = 0.15  # of the ship to either side; the field is 2 wide

var session
var ship
var speed
var stars
var fallen
var caught


func _init(name):
	session = Client.new(OS.get_environment("STAGECOACH_URL"), OS.get_environment("STAGECOACH_TOKEN"), name)


func _ready():
	session.connect("ended", self, "_on_ended")
	add_child(session)
	play()


# The game stands still until the action is there: a tick is a turn, however long the policy takes.
func play():
	while true:
		begin()
		session.reset(observation())
		while fallen < STARS:
			var action = yield(session, "acted")
			var reward = tick(action - 1)
			var last = fallen == STARS
			session.step(reward, observation(), last, false, {"caught": caught} if last else {})
			update()
		emit_signal("over", caught)


func begin():
	ship = rand_range(-1, 1)
	speed = 0.0
	stars = [Vector2(rand_range(-1, 1), 0.5), Vector2(rand_range(-1, 1), 1)]
	fallen = 0
	caught = 0


func observation():
	return [ship, 5 * speed, stars[0].x - ship, stars[0].y, stars[1].x - ship, stars[1].y]


# Moves the ship and the stars; returns the reward.
func tick(direction):
	speed = 0.9 * speed + 0.03 * direction
	ship += speed
	if abs(ship) > 1:
		ship = clamp(ship, -1, 1)
		speed = 0.0
	for number in 2:
		stars[number].y -= FALL
	if stars[0].y > 0:
		return 0
	var reward = 1 if abs(stars[0].x - ship) < REACH else 0
	stars = [stars[1], Vector2(rand_range(-1, 1), 1)]
	fallen += 1
	caught += reward
	return reward


func _draw():
	draw_rect(Rect2(0, 0, 190, 190), Color(0.1, 0.1, 0.2))
	for star in stars:
		draw_circle(place(star), 5, Color(1, 0.9, 0.3))
	var middle = place(Vector2(ship, 0))
	var corners = PoolVector2Array([middle, middle + Vector2(-13, 10), middle + Vector2(13, 10)])
	draw_colored_polygon(corners, Color(0.4, 0.8, 1))


func place(point):
	return Vector2(95 + 85 * point.x, 175 - 165 * point.y)


func _on_ended(error, message):
	printerr("%s: %s" % [error, message])
	get_tree().quit(1)
