-- Opens a session of a node, for who holds the coordinator's epoch in force.
local P, coordinator, node, above, sender = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local has = redis.call('HMGET', P .. 'leader', 'e', 'h')
local leader = has[1] or '0'
if leader ~= coordinator or leader == '0' or (sender ~= '' and sender ~= has[2]) then return { 0, leader } end
local before = tonumber(redis.call('HGET', P .. 'sessions', node) or '0')
local epoch = string.format('%.0f', math.max(before, above) + 1)
redis.call('HSET', P .. 'sessions', node, epoch)
return { 1, epoch }
