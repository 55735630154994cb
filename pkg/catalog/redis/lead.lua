-- Claims or renews leadership. leader holds the epoch in force, whom it was granted to and for how long, for
-- ever; lease only says, by its life, whether another may claim. A life ends by the server's clock: where that
-- was set back, the lease has more left than it was granted, and is cut to that.
local P, holder, ttl_ms, above = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local has = redis.call('HMGET', P .. 'leader', 'e', 'h', 't')
local epoch, owner = tonumber(has[1] or '0'), has[2] or ''
if owner ~= holder then
  local left, granted = redis.call('PTTL', P .. 'lease'), tonumber(has[3] or '')
  if granted and left > granted then
    redis.call('PEXPIRE', P .. 'lease', granted)
    left = granted
  end
  if left > 0 then return { 0, owner, string.format('%.0f', epoch), left } end
end
if owner ~= holder or epoch <= above then
  epoch = math.max(epoch, above) + 1
  redis.call('HSET', P .. 'leader', 'e', string.format('%.0f', epoch), 'h', holder)
end
redis.call('HSET', P .. 'leader', 't', ttl_ms)
redis.call('SET', P .. 'lease', holder, 'PX', ttl_ms)
return { 1, holder, string.format('%.0f', epoch), tonumber(ttl_ms) }
